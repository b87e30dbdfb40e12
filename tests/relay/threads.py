"""Relays in threads of the test, and what is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.quality.measurements import ShardStatus
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox, wait_until

# The row alone would still name one that was killed.
_OWNERS: Final = """
SELECT CASE WHEN EXISTS (SELECT FROM pg_locks
                         WHERE locktype = 'advisory' AND objsubid = 2 AND granted
                           AND pid = s.pid AND objid = s.shard)
            THEN owner END
FROM outbox_shards s ORDER BY shard"""


def quick(outbox: Outbox, **more: object) -> Settings:
    return outbox.settings.model_copy(update={"retry_seconds": 0.05, **more})


@contextmanager
def running(settings: Settings) -> Iterator[None]:
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            service.relay(settings, stop=stop)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    relay = threading.Thread(target=run)
    relay.start()
    try:
        yield
    finally:
        stop.set()
        relay.join(600)
    assert failures == []
    assert not relay.is_alive()


@contextmanager
def relays(outbox: Outbox, count: int, **more: object) -> Iterator[None]:
    """So many relays, each taking whichever shard is free."""
    stop = threading.Event()
    failures: list[BaseException] = []
    settings = quick(outbox, **more)

    def run(owner: str) -> None:
        try:
            service.relay(settings, owner=owner, stop=stop)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(f"relay {n}",)) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(600)
    assert failures == []


def measured(outbox: Outbox) -> list[ShardStatus]:
    return outbox_measurements.read(outbox.settings).shards


def owners(outbox: Outbox) -> list[str | None]:
    """Who owns each shard, as `measured` says, for a tenth of its cost: this is asked again and again."""
    return [owner for (owner,) in outbox.rows(_OWNERS)]


def wait_for_holders(outbox: Outbox, count: int) -> None:
    def held() -> bool:
        names = owners(outbox)
        return len(names) == count and None not in names and len(set(names)) == count

    wait_until(held, seconds=30, what=f"{count} shards with a relay each")


def wait_until_relayed(outbox: Outbox) -> None:
    wait_until(
        lambda: not any(shard.backlog for shard in measured(outbox)),
        seconds=60,
        what="no backlog",
    )
