"""exactly_once where its two logs could differ: late answers, aborts, crashes in between (G1, G5)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.crash_guard import CrashGuard
from outbox_pipelines.relay.core.transactions import Phase, TransactionalPublisher
from outbox_pipelines.relay.kafka import transactional_producer
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.shared import SharedLedger
from tests.conftest import Outbox, wait_until
from tests.relay.parked import keys, numbers, parked_rows, write
from tests.relay.test_exactly_once import ONCE
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import NOISE, change_topic, create_topic


def _assert_each_once(outbox: Outbox, events: int) -> None:
    ids = [message.headers["id"] for message in outbox.messages()]
    assert (len(set(ids)), len(ids)) == (events, events)


def test_a_commit_that_is_not_answered_at_first(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against events that join a transaction whose commit has begun: they count as published."""
    monkeypatch.setattr(TransactionalPublisher, "_is_full", lambda self: self._pending_events >= 5_000)
    tries: list[int] = []
    commit = TransactionalPublisher._commit

    def counted(self: TransactionalPublisher) -> None:
        # The first try ends before the broker can answer. One that ends in the same microsecond as the answer
        # comes makes librdkafka 2.16 abort the process ("Invalid transaction state transition").
        seconds = 0.001 if self._phase is Phase.FLUSHING else 5.0
        monkeypatch.setattr(transactional_producer, "_COMMIT_SECONDS", seconds)
        tries.append(1)
        commit(self)

    monkeypatch.setattr(TransactionalPublisher, "_commit", counted)
    outbox.fill(30_000)
    service.relay(quick(outbox, **ONCE, batch_events=1_000), until_empty=True)
    assert len(tries) > 6, "no commit took more than one try"
    _assert_each_once(outbox, 30_000)


@pytest.mark.extended
def test_kafka_stands_still_during_a_drain(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards the same with large events and a broker that is stopped for longer than one try of a commit."""
    _, kafka, outbox = own_servers
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', (n % 50)::text, 'order.placed', jsonb_build_object('n', n, 'noise', "
            "  (SELECT string_agg(md5(n::text || i), '') FROM generate_series(1, 48) i)) "
            "FROM generate_series(1, 40000) n"
        )
    with running(quick(outbox, delivery="exactly_once", transaction_seconds=30.0)):
        wait_until(lambda: _settled(outbox) > 0, seconds=60, what="a part of the tick to be settled")
        kafka.freeze()
        try:
            assert not threading.Event().wait(2.5)  # how long the fault lasts
        finally:
            kafka.thaw()
        wait_until_relayed(outbox)
    _assert_each_once(outbox, 40_000)


@pytest.mark.extended
def test_a_refusal_among_released_events(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a commit that waits without end for what follows a refused batch.

    Kafka's client sends nothing more of that partition, and takes no other call while it waits.
    """
    create_topic(outbox, **{"max.message.bytes": "60000"})
    large, larger, small = NOISE[:5_000], NOISE, NOISE[:1]
    contents = [large, small, small, larger, small, small]
    write(outbox, *[("a", {"n": n, "noise": noise}) for n, noise in enumerate(contents)])
    with outbox.connect() as connection:
        # Passed over by the position, as after a refusal.
        connection.execute("INSERT INTO outbox_parked SELECT *, 'waiting', 0, now(), NULL FROM outbox")
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
    with running(quick(outbox, **ONCE | {"max_attempts": 1})):
        wait_until(
            lambda: [row[2] for row in parked_rows(outbox)] == ["failed"],
            seconds=60,
            what="the refused event to be a dead letter",
        )
    assert numbers(outbox, "a") == [0, 1, 2, 4, 5]
    assert not [record for record in caplog.records if "starting over" in record.message]


def _settled(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        row = connection.execute("SELECT coalesce(last_seq, 0) FROM outbox_shards").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.extended
def test_a_crash_while_released_events_are_removed(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a tick that is opened before the events released in the last one are removed.

    Kafka's record of them is not believed from then on, and they would be released again.
    """
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 20)])
    settings = quick(outbox, max_attempts=1000, **ONCE)
    hand, request, execute = SharedLedger.hand_over, SharedLedger.request, Shard.execute
    kept: list[Any] = []

    def late(self: SharedLedger, batches: list[Any]) -> None:
        kept.extend(batch for batch in batches if isinstance(batch.batch, ReleasedBatch))
        hand(self, [batch for batch in batches if not isinstance(batch.batch, ReleasedBatch)])

    def together(self: SharedLedger, wanted: Any) -> None:
        # The settler is busy: it finds the released events and the next tick at once.
        with self._changed:
            hand(self, kept)
            kept.clear()
            request(self, wanted)

    def dying(self: Shard, query: Any, parameters: Any) -> Any:
        if query is parking_sql.RELEASED and parameters["seqs"]:
            raise SystemExit("dead")
        return execute(self, query, parameters)

    monkeypatch.setattr(SharedLedger, "hand_over", late)
    monkeypatch.setattr(SharedLedger, "request", together)
    monkeypatch.setattr(Shard, "execute", dying)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            service.relay(settings)
        except SystemExit as error:
            failure.append(error)

    relay = threading.Thread(target=run)
    relay.start()
    wait_until(lambda: len(parked_rows(outbox)) == 20)
    change_topic(outbox, **{"max.message.bytes": "2000000"})
    wait_until(lambda: numbers(outbox, "a"), seconds=60, what="the released events")
    write(outbox, ("b", {"n": 0}))
    relay.join(600)
    assert failure, "the relay did not die"
    monkeypatch.undo()
    with running(settings):
        wait_until(lambda: parked_rows(outbox) == [], what="nothing parked")
        wait_until_relayed(outbox)
    assert numbers(outbox, "a") == list(range(20))
    _assert_each_once(outbox, 21)


@pytest.mark.extended
def test_a_refusal_after_events_of_its_batch_were_parked(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a batch that is parked only once: what its first transaction refuses would be lost."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(outbox, **ONCE | {"max_attempts": 1000, "retry_seconds": 100.0})
    with running(settings):
        write(outbox, ("a", {"n": 0, "noise": NOISE}))
        wait_until(lambda: len(parked_rows(outbox)) == 1, seconds=60)
        for n in range(1, 6):
            write(outbox, ("a", {"n": n}), (f"guilty {n}", {"noise": NOISE}))
            wait_until(
                lambda n=n: len(parked_rows(outbox)) == 1 + 2 * n,  # type: ignore[misc]
                seconds=60,
                what="both events to be parked",
            )


@pytest.mark.extended
def test_a_crash_after_the_first_event_of_a_tick_was_parked(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a record of the tick before, which is believed of a tick that was not opened."""
    outbox.write("before")
    settings = quick(outbox, **ONCE, retry_seconds=100.0)
    service.relay(settings, until_empty=True)
    outbox.write("deadly")
    outbox.write("after", "after")
    with outbox.connect() as connection:
        connection.execute(
            "UPDATE outbox_shards SET owner = 'died', crashes = 2, crash_guard_crashes = 1, "
            "crash_guard_seq = (SELECT seq FROM outbox WHERE aggregate_id = 'deadly')"
        )

    def dying(self: CrashGuard, part: Batch) -> None:
        raise SystemExit("dead")

    monkeypatch.setattr(CrashGuard, "passed", dying)
    with pytest.raises(SystemExit):
        service.relay(settings, until_empty=True)
    monkeypatch.undo()
    assert [row[2] for row in parked_rows(outbox)] == ["retrying"]
    service.relay(settings, until_empty=True)
    assert sorted(keys(outbox)) == ["after", "after", "before"]
