"""Several outboxes, each in a database of its own, and fleets in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.relay.fleet.relay_all import relay_all
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.settings import load_settings
from tests.conftest import ADOPT, Outbox, fresh_database, topic_prefix

NAMES = ("orders", "billing", "shipping")


@pytest.fixture
def outboxes(stack: Stack, migrated: str) -> Iterator[list[Outbox]]:
    """Three."""
    with ExitStack() as databases:
        found = []
        for name in NAMES:
            dsn = databases.enter_context(fresh_database(stack.dsn, migrated))
            with psycopg.connect(dsn) as connection:
                connection.execute(ADOPT)
            topic = f"{topic_prefix()}-{name}-{{aggregate_type}}-events"
            found.append(Outbox(load_settings(dsn=dsn, kafka=stack.kafka, topic=topic, name=name)))
        yield found


@contextmanager
def fleet(
    outboxes: list[Outbox],
    owner: str | None = None,
    *,
    ends: bool = False,
    on_serve: Callable[[str], None] = lambda url: None,
    **more: object,
) -> Iterator[Totals]:
    """A process of a fleet; its totals are known when the block has ended.

    Args:
        ends: whether it ends on its own, which is waited for.
        on_serve: called with the URL of the metrics, with `metrics_port`.
    """
    stop, totals, failures = threading.Event(), Totals(), list[BaseException]()

    def run() -> None:
        settings = [outbox.settings.model_copy(update={"retry_seconds": 0.05, **more}) for outbox in outboxes]
        try:
            totals.events = relay_all(settings, stop=stop, owner=owner, on_serve=on_serve).events
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield totals
    finally:
        if not ends:
            stop.set()
        thread.join(600)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
