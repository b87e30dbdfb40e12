"""Rejections in an existing table: the guilty row is found and counted, and its aggregate alone waits."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import table_measurements
from outbox_pipelines.existing.claim_sessions import MarkedTableSource
from outbox_pipelines.existing.refused_rows import MarkedTableRetries
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.quality import status_text
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.delivery import Delivery
from outbox_pipelines.relay.core.outcomes import Suspect
from outbox_pipelines.relay.core.parked import Attempt
from outbox_pipelines.relay.kafka.topic_admin import TopicAdmin, Unavailable
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.relay.shared import SharedBlockedAggregates
from tests.conftest import read_topic, wait_until
from tests.existing import textbook
from tests.existing.conftest import Make
from tests.existing.test_marks import REFUSE
from tests.existing.textbook import Table
from tests.relay.parked import numbers_by_key
from tests.relay.topic import NOISE, change_topic

SMALL = {"max.message.bytes": "2000"}


def _unpublished(table: Table) -> list[tuple[Any, ...]]:
    rows = table.rows("aggregate_id, retry_count, published_at IS NULL")
    return [(key, attempts) for key, attempts, is_pending in rows if is_pending]


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that may not ask for the topics' limits: it learns of them by refusals."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)


def test_only_the_guilty_aggregate_waits(table: Table) -> None:
    """Guards against a rejected row that stops the relay, is skipped, or is overtaken (G3)."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0}), ("b", {"n": 0}), ("a", {"n": 1, "noise": NOISE}))
    table.write(("a", {"n": 2}), ("b", {"n": 1}), ("c", {"n": 0}))
    totals = table.drain(retry_seconds=60)
    assert sorted(table.keys()) == ["a", "b", "b", "c"]
    assert table.numbers("b") == [0, 1]
    assert (totals.events, totals.unpublished) == (4, 2)
    assert _unpublished(table) == [("a", 1), ("a", 0)]
    (row,) = table.rows("last_error, next_attempt_at > now() + interval '40 s'")[2:3]
    assert "MSG_SIZE_TOO_LARGE" in row[0]
    assert row[1]
    found = table_measurements.read(table.settings)
    assert (found.unpublished, found.retried, found.dead_letters) == (2, 1, 0)
    assert list(found.retried_reasons.values()) == [1]
    shown = status_text.render(found, []).splitlines()
    assert "retried       1 event rejected and retried" in shown
    assert any("1 × " in line and "MSG_SIZE_TOO_LARGE" in line for line in shown)
    # A new relay: the columns say who waits, and until when.
    table.write(("a", {"n": 3}), ("b", {"n": 2}))
    assert table.drain(retry_seconds=60).unpublished == 3
    assert sorted(table.keys()) == ["a", "b", "b", "b", "c"]
    assert table.numbers("b") == [0, 1, 2]
    assert _unpublished(table) == [("a", 1), ("a", 0), ("a", 0)]


@pytest.mark.extended
@pytest.mark.usefixtures("unasked")
def test_several_guilty_events_among_many(table: Table) -> None:
    """Guards against blaming a whole batch, and an isolation that loses, duplicates or reorders others."""
    table.make_topic(4, **SMALL)
    guilty = {100, 500, 501, 930}
    table.write(*[(str(n % 50), {"n": n, "noise": NOISE} if n in guilty else {"n": n}) for n in range(1_000)])
    with table.relayed(max_attempts=2, retry_seconds=0.05, batch_events=200):
        wait_until(lambda: len(_unpublished(table)) == 4, what="all others", seconds=60)
        wait_until(lambda: {row[1] for row in _unpublished(table)} == {2}, what="4 dead letters")
    assert table_measurements.read(table.with_(max_attempts=2).settings).dead_letters == 4
    numbers = numbers_by_key(table.messages())
    for key in range(50):
        expected = [n for n in range(1_000) if n % 50 == key and n not in guilty]
        assert numbers[str(key)] == expected


def test_a_dead_letter_lets_its_aggregate_go_on(table: Table) -> None:
    """Guards against an aggregate that is blocked forever, and an attempt more or less than configured."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 5)])
    with table.relayed(max_attempts=3, retry_seconds=0.05):
        wait_until(lambda: table.numbers("a") == [1, 2, 3, 4], what="the aggregate to go on")
        assert _unpublished(table) == [("a", 3)]
        table.write(("a", {"n": 5}))
        wait_until(lambda: table.numbers("a") == [1, 2, 3, 4, 5], what="the aggregate to be free")


@pytest.mark.extended
def test_a_dead_letter_may_block_its_aggregate(table: Table) -> None:
    """Guards against an aggregate that goes on past a dead letter although the operator said block; and
    against one that does not go on when the row is corrected."""
    table.make_topic(**SMALL)
    block: dict[str, Any] = {"max_attempts": 1, "retry_seconds": 0.05, "on_dead_letter": "block"}
    table.write(("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}), ("b", {"n": 0}))
    with table.relayed(**block):
        wait_until(lambda: _unpublished(table) == [("a", 1), ("a", 0)])
        table.write(("a", {"n": 2}), ("b", {"n": 1}))
        wait_until(lambda: table.numbers("b") == [0, 1])
    with table.relayed(**block), table.connect() as connection:
        table.write(("b", {"n": 2}))
        wait_until(lambda: table.numbers("b") == [0, 1, 2])
        assert table.numbers("a") == []
        connection.execute("UPDATE events SET payload = '{\"n\": 0}', retry_count = 0 WHERE retry_count = 1")
        wait_until(lambda: table.numbers("a") == [0, 1, 2], what="the corrected aggregate")


@pytest.mark.extended
def test_a_corrected_topic_accepts_the_event(table: Table) -> None:
    """Guards against a retry that never comes, or lets later events of the aggregate go first (G2)."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0}), ("a", {"n": 1, "noise": NOISE}), ("a", {"n": 2}), ("b", {"n": 0}))
    with table.relayed(max_attempts=1000, retry_seconds=0.05):
        wait_until(lambda: len(_unpublished(table)) == 2 and _unpublished(table)[0][1] > 1)
        change_topic(table.outbox, **{"max.message.bytes": "2000000"})
        wait_until(lambda: table.numbers("a") == [0, 1, 2], what="the event and those behind it")
        table.write(("a", {"n": 3}))
        wait_until(lambda: table.numbers("a") == [0, 1, 2, 3])
    assert table.pending() == []


def test_a_row_corrected_or_deleted_under_the_relay(table: Table) -> None:
    """Guards against a relay that publishes what it remembers instead of what the table contains."""
    table.make_topic(**SMALL)
    noisy = {"n": 0, "noise": NOISE}
    mended, deleted, _ = table.write(("a", noisy), ("b", noisy), ("b", {"n": 1}))
    with table.relayed(max_attempts=1000, retry_seconds=0.05), table.connect() as connection:
        wait_until(lambda: {row[1] > 0 for row in _unpublished(table)[:2]} == {True})
        connection.execute("UPDATE events SET payload = '{\"n\": 5}' WHERE seq = %s", [mended])
        connection.execute("DELETE FROM events WHERE seq = %s", [deleted])
        wait_until(lambda: (table.numbers("a"), table.numbers("b")) == ([5], [1]))
    assert table.pending() == []


@pytest.mark.extended
def test_an_unavailable_topic_is_said_once_and_not_counted(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against attempts burnt on events that are innocent, and rows rewritten every few seconds."""

    def missing(self: TopicAdmin, names: Iterable[str]) -> dict[str, Unavailable]:
        return {name: Unavailable("does not exist", is_missing=True) for name in names}

    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_lookups._AGAIN_SECONDS", 0.05)
    table.write(("a", {"n": 0}), ("a", {"n": 1}))
    with monkeypatch.context() as patch:
        patch.setattr(TopicAdmin, "describe", missing)
        with table.relayed(max_attempts=1):
            at = table.rows("xmin::text")
            wait_until(lambda: table.rows("xmin::text") != at, what="the reason in the row")
            at = table.rows("xmin::text")
            tries = table.rows("clock_timestamp() + interval '1 s'")[0][0]
            wait_until(lambda: table.rows("clock_timestamp()")[0][0] > tries)
            assert table.rows("xmin::text") == at
    assert table.rows("retry_count, published_at IS NULL") == [(0, True), (0, True)]
    assert "does not exist" in table.rows("last_error")[0][0]
    assert table.drain().events == 2
    assert table.numbers("a") == [0, 1]


@pytest.mark.extended
def test_attempts_are_kept_over_restarts_where_there_is_a_column(make_table: Make) -> None:
    """Guards against a poisoned event that is tried without end because the relay forgets its attempts."""
    table = make_table(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
    pauses: list[Any] = []
    for _ in range(3):
        table.drain(max_attempts=4, retry_seconds=10)
        pauses += table.rows("extract(epoch FROM next_attempt_at - clock_timestamp())::float8")[0]
        with table.connect() as connection:
            connection.execute("UPDATE events SET next_attempt_at = now() WHERE retry_count > 0")
    for pause, expected in zip(pauses, [10, 20, 40], strict=True):
        assert 0.75 * expected < pause < 1.2 * expected
    table.drain(max_attempts=4)
    assert _unpublished(table) == [("a", 4)]
    assert table.numbers("a") == [1]


def test_a_dead_letter_is_reported_and_copied(table: Table, tmp_path: Any) -> None:
    """Guards against a dead letter that is not reported."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE[:2000]}))
    heard = tmp_path / "heard"
    command = f"cat > {heard}.new && mv {heard}.new {heard}"
    table.drain(max_attempts=1, dead_letter_topics=True, dead_letter_command=command)
    wait_until(heard.exists)
    reported = json.loads(heard.read_text())
    assert (reported["kind"], reported["aggregate_id"], reported["attempts"]) == ("dead-letter", "a", 1)
    assert reported["help"] == "correct the row or the topic, then run `outbox dead-letters replay`"
    (copy,) = read_topic(table.settings.kafka, f"{table.outbox.topic()}.dlq")
    assert copy.headers["dead-letter-topic"] == table.outbox.topic()


def test_an_unreadable_row_is_a_dead_letter_until_it_is_changed(table: Table) -> None:
    """Guards against such a row that no column shows as a dead letter, or that waits for a restart."""
    first, _ = table.write(("a", {"n": 0}), ("a", {"n": 1}))
    with table.connect() as connection:
        connection.execute(
            "UPDATE events SET payload = jsonb_build_object('noise', repeat('x', 9000000)) WHERE seq = %s",
            [first],
        )
        with table.relayed(max_attempts=3):
            wait_until(lambda: _unpublished(table) == [("a", 1)])
            connection.execute(
                "UPDATE events SET payload = '{\"n\": 0}', retry_count = 0 WHERE seq = %s", [first]
            )
            wait_until(lambda: _unpublished(table) == [])
    assert table.numbers("a") == [1, 0]


@pytest.mark.extended
def test_a_stop_while_a_refused_event_is_published(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a successor that publishes again what was published while the relay was stopping."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
    table.drain(max_attempts=9, retry_seconds=0.01)
    change_topic(table.outbox, **{"max.message.bytes": "1000000"})
    stop = threading.Event()

    def stopped(self: Prober) -> None:
        stop.set()
        wait_until(lambda: self._end_at < math.inf, what="the relay to end")
        flush(self)

    flush = Prober._flush
    monkeypatch.setattr(Prober, "_flush", stopped)
    service.relay(table.with_(max_attempts=9, retry_seconds=0.01).settings, stop=stop)
    monkeypatch.undo()
    assert len(table.pending()) == 1
    table.drain()
    assert table.numbers("a") == [0, 1]


def test_a_row_that_cannot_be_marked_is_not_tried_alone(table: Table) -> None:
    """Guards against a refused row that every relay publishes once it is accepted, and none can mark."""
    table.make_topic(**SMALL)
    with table.connect() as connection:
        connection.execute(REFUSE.format(n=0, kind="TRIGGER refuse BEFORE UPDATE", when="").encode())
    table.write(("b", {"n": 1}), ("a", {"n": 0, "noise": NOISE}))
    with pytest.raises(SetupError, match="not this one: change what rejects the UPDATE"):
        # The first claim, which is rehearsed, is that of the other row.
        table.drain(batch_events=1)
    assert _unpublished(table) == [("a", 0)]


@pytest.mark.extended
def test_a_long_queue_behind_a_poisoned_row_comes_in_order(table: Table) -> None:
    """Guards against rows that are released while others of their aggregate are still being put back."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 2_501)])
    with table.relayed(max_attempts=3, retry_seconds=0.05, batch_events=250):
        wait_until(lambda: _unpublished(table) == [("a", 3)], seconds=60)
    assert table.numbers("a") == list(range(1, 2_501))


def test_an_aggregate_waits_until_none_of_its_events_is_in_flight(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a row that goes free while an earlier one of its aggregate is put back."""
    tried: list[int] = []

    def submit(self: Prober, batch: list[Attempt]) -> None:
        tried.extend(attempt.event.seq for attempt in batch)

    monkeypatch.setattr(Prober, "submit", submit)
    first, _, _ = table.write(*[("a", {"n": n}) for n in range(3)])
    settings = table.with_(batch_events=1).settings
    ownership = TableOwnership(settings, "test")
    assert ownership.try_take()
    blocked, source = SharedBlockedAggregates(), MarkedTableSource(settings, ownership)
    topics = TopicLookups(settings)
    topics.ask([table.outbox.topic()])
    wait_until(lambda: topics.unavailable(table.outbox.topic()) is None, what="the topic to be found")
    retries = MarkedTableRetries(
        settings, ownership, source, blocked, topics=topics, on_dead_letter=lambda letter: None
    )
    for claim in [source.claim([]), source.claim([]), source.claim([])]:
        assert claim is not None
        assert tried == []
        (event,) = claim.batch.events
        delivery = Delivery(claim.batch)
        delivery.unsent = []
        blocked.park(event, suspect=True)
        delivery.park(event, Suspect("refused"))
        source.settle(claim, [])
        retries.settled(delivery.complete())
        assert source.claim(list(blocked.aggregates)) is None
        retries.advance(may_try=True)
    assert tried == [first]
    topics.close()
    source.sessions.close()
    ownership.close()
