"""Limits on messages that differ, change and meet compression: no event is lost or blamed for them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Final

import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.relay.kafka.client import MOST, BatchSize
from outbox_pipelines.writer import emit
from tests.conftest import EITHER_DELIVERY, Outbox, either, wait_until
from tests.relay.parked import numbers_by_key, parked_rows, write
from tests.relay.threads import quick, running
from tests.relay.topic import NOISE, change_topic, create_topic


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_a_limit_that_is_lowered_and_raised_under_the_relay(outbox: Outbox, delivery: str) -> None:
    """Guards against a limit that is known and wrong: all of a batch parked, or events that stay parked."""
    create_topic(outbox, 2)
    events = [(str(n % 40), {"n": n, "noise": NOISE[n : n + 20]}) for n in range(1_201)]
    with running(quick(outbox, delivery=delivery, max_attempts=1_000)):
        write(outbox, events[0])
        wait_until(lambda: len(outbox.messages()) == 1, what="the first")
        change_topic(outbox, **{"max.message.bytes": "2000"})
        with outbox.connect() as connection:
            connection.execute("ALTER TABLE outbox_parked ADD CONSTRAINT nothing CHECK (false)")
            write(outbox, *events[1:])
            wait_until(lambda: len(outbox.messages()) == 1_201, seconds=60, what="all, none parked")
            connection.execute("ALTER TABLE outbox_parked DROP CONSTRAINT nothing")
        write(outbox, ("0", {"n": 1_201, "noise": NOISE}))
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["retrying"], what="one parked")
        change_topic(outbox, **{"max.message.bytes": "1000000"})
        wait_until(lambda: len(outbox.messages()) == 1_202, what="the parked event")
    found = numbers_by_key(outbox.messages())
    for key in range(1, 40):
        assert found[str(key)] == list(range(key, 1_201, 40))
    assert found["0"] == [*range(0, 1_201, 40), 1_201]


LIMIT: Final = 4_000
TOPICS: Final = {"plain": "producer", "bare": "uncompressed", "packed": "gzip"}


@pytest.mark.parametrize(
    ("delivery", "compression"),
    either(
        ("at_least_once", "lz4"),
        ("at_least_once", "none"),
        ("at_least_once", "gzip"),
        ("at_least_once", "snappy"),
        ("exactly_once", "zstd"),
    ),
)
def test_each_compression_around_the_limit(
    outbox: Outbox, tmp_path: Path, delivery: str, compression: str
) -> None:
    """Guards against a dead letter for an event that fits, and a loss or delay for one that does not."""
    random.seed(1)
    sizes = [*range(LIMIT - 600, LIMIT + 601, 100), *[200] * 100, 10 * LIMIT]
    with outbox.connect(autocommit=False) as connection:
        for name, kind in TOPICS.items():
            create_topic(outbox, of=name, **{"max.message.bytes": str(LIMIT), "compression.type": kind})
            for n, size in enumerate(sizes):
                # JSON of random characters compresses by a fifth, one character repeated to almost nothing.
                noise = "".join(chr(33 + byte % 90) for byte in random.randbytes(size))
                text = noise if size <= 2 * LIMIT else "x" * size
                emit(connection, name, n, "e", {"n": n, "text": text})
    config = {"compression.type": compression}
    settings = quick(outbox, delivery=delivery, kafka_config=config, max_attempts=1, retry_seconds=60)
    service.relay(settings, until_empty=True)
    with outbox.connect() as connection:
        dead = connection.execute(
            "SELECT aggregate_type, aggregate_id::int, state, last_error FROM outbox_parked"
        ).fetchall()
    # None is left undecided.
    assert {row[2] for row in dead} == {"failed"}
    for name, kind in TOPICS.items():
        gone = sorted(row[1] for row in dead if row[0] == name)
        there = sorted(json.loads(message.value or "")["n"] for message in outbox.messages(name))
        assert sorted(gone + there) == list(range(len(sizes)))
        fits_surely = {n for n, size in enumerate(sizes) if size <= LIMIT - 500}
        assert fits_surely <= set(there)
        if compression == "none" or kind == "uncompressed":
            assert {n for n, size in enumerate(sizes) if size > LIMIT} <= set(gone)
        else:
            assert len(sizes) - 1 in there
    assert all("larger than the topic's max.message.bytes" in row[3] for row in dead)


def test_one_low_limit_counts_as_long_as_its_topic_is_used() -> None:
    """Guards against small batches for good, for one event of a small topic, and against too large ones."""
    now = time.monotonic()
    size = BatchSize()
    assert not size.turn(now)
    size.use("small", 2_000)
    size.use("large", 5_000_000)
    assert (size.must_shrink, size.wanted) == (True, 2_000)
    size.current = size.wanted
    assert not size.turn(now + 9)
    assert size.turn(now + 11)
    assert not size.is_outdated
    size.use("large", 5_000_000)
    assert size.turn(now + 22)
    assert (size.must_shrink, size.is_outdated, size.wanted) == (False, True, MOST)
    size.use("small", 2_000)
    assert not size.is_outdated


def test_an_unknown_limit_is_approached_until_it_is_known() -> None:
    """Guards against endless refusals, and against small batches for a limit that is no longer so."""
    size = BatchSize()
    size.use("topic", None)
    reached = []
    while size.lower("topic", None):
        size.current = size.wanted
        reached.append(size.current)
    assert reached == [250_000, 62_500, 15_625, 3_906, 1_000]
    assert not size.lower("topic", None)
    size.turn(0.0)
    size.use("topic", 900_000)
    assert size.turn(20.0)
    assert size.wanted == 900_000
