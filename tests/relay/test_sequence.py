"""A sequence that is behind its rows: it is noticed; no event is lost, published twice or out of order."""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_pipelines.core.sequence import SequenceError
from outbox_pipelines.relay import service
from outbox_pipelines.relay.lease.rebase import Rebased, rebase
from outbox_pipelines.relay.lease.resharding import change
from outbox_pipelines.writer import emit
from tests.conftest import EITHER_DELIVERY, Outbox, either, wait_until
from tests.relay.parked import numbers_by_key, parked_rows, write
from tests.relay.threads import quick, relays
from tests.relay.topic import NOISE, change_topic, create_topic


def _set_back(outbox: Outbox, to: int = 1) -> None:
    with outbox.connect() as connection:
        connection.execute("SELECT setval('outbox_seq', %s, false)", [to])


def _keys(outbox: Outbox) -> list[str]:
    return sorted(message.key for message in outbox.messages())


def test_a_sequence_that_is_behind(outbox: Outbox) -> None:
    """Guards against numbers that are given again while every command reports that all is well."""
    outbox.write("a", "b", "c", "d")
    service.relay(outbox.settings, until_empty=True)
    _set_back(outbox)
    outbox.write("e", "f")
    for arguments in (["relay", "--until-empty"], ["migrate", "--check"], ["status", "--check"]):
        refused = outbox.outbox(*arguments)
        assert refused.returncode != 0, arguments
        said = refused.stdout + refused.stderr
        assert "outbox_seq is at 2, behind seq 4" in said, arguments
        assert "run `outbox relay --rebase`" in said, arguments
    assert _keys(outbox) == ["a", "b", "c", "d"]
    rebased = outbox.outbox("relay", "--rebase", "--until-empty")
    assert rebased.returncode == 0, rebased.stderr
    assert "raised from 2 to 6" in rebased.stderr
    assert "new numbers (seq) for 2 unpublished events" in rebased.stderr
    assert _keys(outbox) == ["a", "b", "c", "d", "e", "f"]
    assert outbox.outbox("migrate", "--check").returncode == 0
    assert "--rebase" not in outbox.outbox("status").stdout
    assert outbox.write("g") == [7]
    assert rebase(outbox.settings) is None


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_numbers_that_were_published_before(outbox: Outbox, delivery: str) -> None:
    """Guards against a settle that fails at each start, after the same events were published again."""
    settings = outbox.settings.model_copy(update={"delivery": delivery})
    outbox.write("a", "b", "c")
    service.relay(settings, until_empty=True)
    _set_back(outbox)
    outbox.write("d", "e", "f")
    for _ in range(2):
        service.relay(settings, until_empty=True)
    assert _keys(outbox) == ["a", "b", "c", "d", "e", "f"]


def test_a_relay_that_runs_notices(outbox: Outbox) -> None:
    """Guards against events that are read and parked by numbers which others have."""
    outbox.write(*"abcd")
    failures: list[BaseException] = []
    taken = threading.Event()

    def run() -> None:
        try:
            service.relay(outbox.settings, on_progress=lambda settled: taken.set())
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    relay = threading.Thread(target=run)
    relay.start()
    assert taken.wait(60)
    _set_back(outbox)
    relay.join(30)
    assert [type(failure) for failure in failures] == [SequenceError]


@pytest.mark.parametrize("shards", either(1, 2))
@pytest.mark.parametrize("limits", [{"batch_events": 2}, {"batch_bytes": 1}, {"batch_events": 1}])
@pytest.mark.parametrize("size", [10, 20_000])
def test_two_events_with_one_number_in_a_tick(
    outbox: Outbox, shards: int, limits: dict[str, int], size: int
) -> None:
    """Guards against a batch that ends between them: the second would count as published."""
    if shards > 1:
        with relays(outbox, shards):
            change(outbox.settings, shards)
    settings = outbox.settings.model_copy(update=limits)
    noise = "x" * size
    write(outbox, *((f"k{n}", {"n": 0, "x": noise}) for n in range(8)))
    _set_back(outbox)
    write(outbox, *((f"k{n}", {"n": 1, "x": noise}) for n in range(8)))
    for _ in range(shards):
        try:
            service.relay(settings, until_empty=True)
        except SequenceError:
            rebase(settings)
    service.relay(settings, until_empty=True)
    found = numbers_by_key(outbox.messages())
    assert {key: sorted(numbers) for key, numbers in found.items()} == {f"k{n}": [0, 1] for n in range(8)}


def test_renumbered_rows_are_these_alone(outbox: Outbox) -> None:
    """Guards against a published row that gets the number of one with the same id, or the same time."""
    outbox.write("published")
    service.relay(outbox.settings, until_empty=True)
    with outbox.connect(autocommit=False) as connection:
        ((id, at),) = connection.execute("SELECT id, created_at FROM outbox").fetchall()
        for key, its_id, its_time in (
            ("same id", id, at + timedelta(microseconds=1)),
            ("same time", uuid4(), at),
        ):
            connection.execute("SELECT setval('outbox_seq', 1, false)")
            connection.execute("SET LOCAL outbox.backfill = on")
            connection.execute(
                "INSERT INTO outbox (id, created_at, aggregate_type, aggregate_id, event_type, payload) "
                "VALUES (%s, %s, 'order', %s, 'order.placed', '{}')",
                [its_id, its_time, key],
            )
    assert rebase(outbox.settings) is not None
    with outbox.connect() as connection:
        rows = connection.execute("SELECT aggregate_id, seq FROM outbox ORDER BY seq").fetchall()
    assert rows == [("published", 1), ("same time", 2), ("same id", 3)]
    service.relay(outbox.settings, until_empty=True)
    assert _keys(outbox) == ["published", "same id", "same time"]
    assert outbox.write("next") == [4]


def test_events_from_before_keep_their_numbers(outbox: Outbox) -> None:
    """Guards against the first of two events that gets the higher number: both are from before."""
    with outbox.connect(autocommit=False) as older:
        older.execute("SELECT pg_current_xact_id()")
        write(outbox, ("x", {"n": 0}), ("x", {"n": 1}))
        emit(older, "order", "y", "order.placed", {"n": 0})
    with outbox.connect() as connection:
        # As a copy of the sequence from the moment between the two.
        connection.execute("SELECT setval('outbox_seq', 1)")
    assert rebase(outbox.settings) == Rebased(None, None, (1, 3), 0)
    service.relay(outbox.settings, until_empty=True)
    assert numbers_by_key(outbox.messages()) == {"x": [0, 1], "y": [0]}


@pytest.mark.parametrize("to", [2, 12])
def test_order_across_a_sequence_that_was_set_back(outbox: Outbox, to: int) -> None:
    """Guards against low numbers that are published before the higher ones of earlier transactions."""
    for n in range(10):
        write(outbox, ("published", {"n": n}))
    service.relay(outbox.settings, until_empty=True)
    for n in range(4):
        write(outbox, ("x", {"n": n}))
    # From 12 on, unpublished events have the numbers, too.
    _set_back(outbox, to)
    for n in range(4, 6):
        write(outbox, ("x", {"n": n}))
    assert rebase(outbox.settings) is not None
    service.relay(outbox.settings, until_empty=True)
    assert numbers_by_key(outbox.messages())["x"] == list(range(6))


def test_the_content_of_the_right_row(outbox: Outbox) -> None:
    """Guards against the content of an older row with the same number, read again by number."""
    for n in range(2):
        _set_back(outbox)
        write(outbox, (f"k{n}", {"n": n, "x": "x" * 20_000}))
        try:
            service.relay(outbox.settings, until_empty=True)
        except SequenceError:
            assert rebase(outbox.settings) is not None
            service.relay(outbox.settings, until_empty=True)
    assert Counter(json.loads(message.value or "")["n"] for message in outbox.messages()) == {0: 1, 1: 1}


def test_the_number_of_a_dead_letter(outbox: Outbox) -> None:
    """Guards against a refused event that is lost because another one is parked under its number."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(outbox, max_attempts=1)
    write(outbox, ("a", {"n": 0, "noise": NOISE}))
    service.relay(settings, until_empty=True)
    with outbox.connect() as connection:
        # Its day was dropped.
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM outbox")
    _set_back(outbox)
    write(outbox, ("b", {"n": 1, "noise": NOISE}))
    with pytest.raises(SequenceError, match="two events have seq 1"):
        service.relay(settings, until_empty=True)
    assert rebase(outbox.settings) is not None
    service.relay(settings, until_empty=True)
    assert [(row[0], row[2]) for row in parked_rows(outbox)] == [("a", "failed"), ("b", "failed")]
    change_topic(outbox, **{"max.message.bytes": "1000000"})
    assert outbox.outbox("dead-letters", "replay", "--all", "--reason", "x", "--yes").returncode == 0
    service.relay(settings, until_empty=True)
    assert _keys(outbox) == ["a", "b"]


def test_the_status_of_an_event_with_the_number_of_a_dead_letter(outbox: Outbox) -> None:
    """Guards against a published event that is shown as the dead letter with the same number."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(outbox, max_attempts=1)
    write(outbox, ("a", {"n": 0, "noise": NOISE}))
    service.relay(settings, until_empty=True)
    _set_back(outbox)
    write(outbox, ("b", {"n": 1}))
    service.relay(settings, until_empty=True)
    with outbox.connect() as connection:
        rows = connection.execute("SELECT aggregate_id, status FROM outbox_events ORDER BY 1").fetchall()
    assert rows == [("a", "FAILED"), ("b", "PROCESSED")]


@pytest.mark.parametrize(
    "kept",
    [
        "INSERT INTO outbox_released (seq, id, attempts) VALUES (50, gen_random_uuid(), 1)",
        "UPDATE outbox_days SET last_seq = 50 WHERE day = (SELECT min(day) FROM outbox_days)",
    ],
)
def test_numbers_of_events_that_are_no_longer_in_the_table(outbox: Outbox, kept: str) -> None:
    """Guards against the numbers of archived and released events, given again."""
    outbox.write("a")
    with outbox.connect() as connection:
        connection.execute(kept.encode())
    with pytest.raises(SequenceError, match="behind seq 50"):
        service.relay(outbox.settings, until_empty=True)
    assert rebase(outbox.settings) is not None
    assert outbox.write("b") == [52]
    service.relay(outbox.settings, until_empty=True)
    assert _keys(outbox) == ["a", "b"]


def test_a_relay_that_runs_beside_a_rebase(outbox: Outbox) -> None:
    """Guards against a relay that settles numbers which a rebase has changed."""
    outbox.write(*"abcd")
    with relays(outbox, 1):
        wait_until(lambda: len(outbox.messages()) == 4)
        with outbox.connect() as connection:
            (before,) = connection.execute("SELECT epoch FROM outbox_shards").fetchone() or (0,)
            connection.execute("UPDATE outbox_days SET last_seq = 50")
            assert rebase(outbox.settings) is not None
            # The relay has taken the shard again.
            wait_until(
                lambda: connection.execute("SELECT epoch FROM outbox_shards").fetchone() == (before + 2,)
            )
        outbox.write("e")
        wait_until(lambda: len(outbox.messages()) == 5)
