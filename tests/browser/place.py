"""A place to look at: an outbox with days that are over, and `dagster dev` on it."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

from examples.airline.pages import serving
from examples.airline.sessions import environment, make_home
from outbox_pipelines.database import schema
from outbox_pipelines.local import Stack
from outbox_pipelines.local.server import free_port
from outbox_pipelines.relay.service import relay
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, fresh_database, topic_prefix
from tests.days.archive.days import days_ago

PAST: Final[tuple[date, ...]] = tuple(days_ago(days) for days in (7, 6, 5, 4, 3))
EVENTS_A_DAY: Final = 200
# Short, so that there are materializations, and a handover, while the tests look; but a session costs 4 s of
# a core.
_SESSION_SECONDS: Final = 60.0
# Those that would do what a test wants to do itself.
_STILL: Final = ("archive_days", "drop_days", "maintain_partitions", "purge_history")


@dataclass(frozen=True)
class Place:
    """What is served, and what lies behind it."""

    address: str
    outbox: Outbox
    archive: Path

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Dagster's GraphQL."""
        request = urllib.request.Request(
            f"{self.address}/graphql",
            json.dumps({"query": query, "variables": variables}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        assert not found.get("errors"), found["errors"]
        return found["data"]  # type: ignore[no-any-return]


@contextmanager
def place(stack: Stack, directory: Path) -> Iterator[Place]:
    """Serves it for as long as the block."""
    archive, home = directory / "archive", directory / "home"
    archive.mkdir()
    with fresh_database(stack.dsn) as dsn:
        settings = load_settings(
            dsn=dsn, kafka=stack.kafka, topic=f"{topic_prefix()}-{{aggregate_type}}", archive=str(archive)
        )
        schema.migrate(settings)
        outbox = Outbox(settings)
        _fill_the_past(outbox)
        make_home(home)
        variables = {
            **environment(settings, home, _SESSION_SECONDS),
            # One refusal is enough for a dead letter.
            "OUTBOX_MAX_ATTEMPTS": "1",
        }
        with serving(variables, home, free_port()) as pages, _trickle(outbox):
            pages.wait_until_ready()
            served = Place(pages.address, outbox, archive)
            _stop_schedules(served)
            yield served


def _fill_the_past(outbox: Outbox) -> None:
    with outbox.connect() as connection:
        connection.execute("SELECT outbox_ensure_partitions(14, %s)", [min(PAST)])
    for day in PAST:
        with outbox.connect(autocommit=False) as connection:
            connection.execute("SET LOCAL outbox.backfill = on")
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
                "SELECT 'order', (i %% 20)::text, 'order.placed', jsonb_build_object('n', i), "
                "%s::date::timestamp AT TIME ZONE 'UTC' + make_interval(mins => i) "
                "FROM generate_series(1, %s) i",
                [day, EVENTS_A_DAY],
            )
    relay(outbox.settings, until_empty=True)


@contextmanager
def _trickle(outbox: Outbox) -> Iterator[None]:
    """Events that come in all the time."""
    ended = threading.Event()

    def write() -> None:
        with outbox.connect(autocommit=False) as connection:
            number = 0
            # Each event is a batch of the relay, and an answer of Kafka.
            while not ended.wait(0.5):
                number += 1
                emit(connection, "order", number % 20, "order.placed", {"n": number})
                connection.commit()

    thread = threading.Thread(target=write, name="trickle")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _stop_schedules(served: Place) -> None:
    for state in served.ask(
        '{schedulesOrError(repositorySelector: {repositoryName: "__repository__", '
        'repositoryLocationName: "outbox"}) '
        "{... on Schedules {results {name scheduleState {id}}}}}"
    )["schedulesOrError"]["results"]:
        if state["name"] in _STILL:
            served.ask(
                "mutation($id: String!) {stopRunningSchedule(id: $id) {__typename}}",
                id=state["scheduleState"]["id"],
            )
