"""Kafka clients end with the relay that made them, and not when the garbage collector finds them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from tests.conftest import EITHER_DELIVERY, Outbox, wait_until
from tests.relay.parked import keys, write
from tests.relay.threads import quick, running
from tests.relay.topic import NOISE, create_topic

_THREADS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(not _THREADS.exists(), reason="counts threads as Linux shows them")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _clients() -> int:
    names = []
    for thread in _THREADS.iterdir():
        try:
            names.append((thread / "comm").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    # Each client of librdkafka has one such thread.
    return names.count("rdk:main\n")


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_end_with_their_relay(outbox: Outbox, delivery: str) -> None:
    """Guards against a process that gathers the threads and connections of relays that have ended."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    # What reads here is kept for other tests.
    assert keys(outbox) == []
    before = _clients()
    write(outbox, ("a", {}), ("poison", {"noise": NOISE}))
    assert service.relay(quick(outbox, delivery=delivery), until_empty=True).unpublished == 1
    assert keys(outbox) == ["a"]
    wait_until(lambda: _clients() <= before, what="the end of the clients")


@pytest.mark.extended
def test_are_two_while_a_relay_publishes_in_transactions(outbox: Outbox) -> None:
    """Guards against clients that are not served, whose reports of errors pile up."""
    assert keys(outbox) == []
    before = _clients()
    with running(quick(outbox, delivery="exactly_once")):
        outbox.write("a")
        wait_until(lambda: keys(outbox) == ["a"], what="an event")
        wait_until(lambda: _clients() == before + 2, what="the client before the first transaction to end")


@pytest.mark.extended
def test_end_with_a_start_that_fails(outbox: Outbox) -> None:
    """Guards against two more clients for each try while there is no shard, or no database."""
    before = _clients()
    producer = IdempotentProducer(outbox.settings)
    producer.connect()
    # A thread begins with the name of the one that started it.
    wait_until(lambda: _clients() == before + 2, what="two clients")
    del producer
    wait_until(lambda: _clients() <= before, what="the end of the clients")
