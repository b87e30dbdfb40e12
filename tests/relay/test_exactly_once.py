"""exactly_once: a consumer of committed messages sees each event once, in order (G5)."""

from __future__ import annotations

import json
import random
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.batch import Batch, BatchQueue
from outbox_pipelines.relay.core.producers import CommitAnswer
from outbox_pipelines.relay.core.record import Record
from outbox_pipelines.relay.core.transactions import Phase, TransactionalPublisher
from outbox_pipelines.relay.kafka import progress_topic
from outbox_pipelines.relay.kafka.transactional_producer import FencingProducer
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.read import reader
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, either, wait_until
from tests.history import business
from tests.history.verify import verdict
from tests.history.writers import Writers
from tests.kafka_clients import Producer
from tests.relay import faults
from tests.relay.parked import keys, numbers, numbers_by_key, parked_rows, write
from tests.relay.threads import quick, relays, running, wait_for_holders, wait_until_relayed
from tests.relay.topic import NOISE, change_topic, create_topic

ONCE = {"delivery": "exactly_once", "transaction_seconds": 4.0}
ENVIRONMENT = {
    "OUTBOX_DELIVERY": "exactly_once",
    "OUTBOX_TRANSACTION_SECONDS": "4",
    "OUTBOX_LEASE_SECONDS": "2",
}


def _drain(outbox: Outbox, **more: object) -> Totals:
    return service.relay(quick(outbox, **ONCE | more), until_empty=True)


def _assert_once(outbox: Outbox, events: int) -> None:
    messages = outbox.messages()
    assert len({message.headers["id"] for message in messages}) == events
    assert len(messages) == events


@pytest.mark.extended
def test_small_and_big_ticks(outbox: Outbox, is_short: bool) -> None:
    """Guards against transactions that leave something out, or that no reader ever sees."""
    # More than one transaction may have.
    events = 50_000 if is_short else 120_000
    outbox.write(1, 2, 3)
    assert _drain(outbox).events == 3
    outbox.fill(events)
    assert _drain(outbox).events == events
    outbox.write(4)
    assert _drain(outbox).events == 1
    _assert_once(outbox, events + 4)
    numbers = numbers_by_key(outbox.messages())
    for key in range(5, 100):
        assert numbers[str(key)] == list(range(key, events + 1, 100))


@pytest.mark.extended
def test_what_comes_while_kafka_ends_a_transaction_is_in_the_next(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a transaction for each event, which would queue up behind each other."""
    commit, add = FencingProducer.commit, BatchQueue.add
    commits: list[CommitAnswer] = []
    read: list[object] = []

    def counted(self: BatchQueue, batch: Batch | None) -> None:
        add(self, batch)
        read.extend(batch.events if batch is not None else ())

    def await_end(self: FencingProducer) -> None:
        """As long as it takes to read what is written then."""
        if commits:
            wait_until(lambda: len(read) == 20, what="all events to be read")

    # Without demand, the reader would wait in vain.
    monkeypatch.setattr(reader, "_DEMAND_SECONDS", 300.0)
    monkeypatch.setattr(BatchQueue, "add", counted)
    monkeypatch.setattr(FencingProducer, "await_end", await_end)

    def noted(self: FencingProducer) -> CommitAnswer:
        answer = commit(self)
        if answer is not CommitAnswer.NONE:
            commits.append(answer)
        return answer

    monkeypatch.setattr(FencingProducer, "commit", noted)
    with running(quick(outbox, **ONCE)):
        outbox.write(0)
        wait_until(lambda: commits)
        # Each its own transaction, and none its own connection: a loaded machine needs 0.2 s for one.
        with outbox.connect() as connection:
            for n in range(1, 20):
                with connection.transaction():
                    emit(connection, "order", n, "order.placed", {"n": n})
        wait_until_relayed(outbox)
    assert len(commits) == 2
    _assert_once(outbox, 20)


@pytest.mark.parametrize("when", either("after the commit", "before the commit", "after the settle"))
def test_a_crash_around_the_commit(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Guards against a successor that does not ask Kafka how far its predecessor was."""
    outbox.fill(9_000, aggregates=10)
    commit = TransactionalPublisher._commit
    commits = []

    def dying(self: TransactionalPublisher) -> None:
        # A commit that Kafka has not answered within a second is asked for again.
        if self._phase is Phase.FLUSHING:
            commits.append(1)
        if when == "before the commit" and len(commits) == 2:
            self._prepare()
            self._producer.flush(10)
            raise SystemExit("dead")
        commit(self)
        if when == "after the commit":
            raise SystemExit("dead")
        if when == "after the settle" and self._phase is Phase.NONE:
            assert self.requests is not None
            self.requests.settle_all()
            raise SystemExit("dead")

    # A process that dies gives nothing back, aborts nothing and settles nothing.
    monkeypatch.setattr(TransactionalPublisher, "_commit", dying)
    monkeypatch.setattr(TransactionalPublisher, "_is_full", lambda self: self._pending_events >= 4_000)
    monkeypatch.setattr(TransactionalPublisher, "discard", lambda self: None)
    settle = Shard.settle
    monkeypatch.setattr(
        Shard, "settle", lambda self, *a, **k: None if k.get("last") else settle(self, *a, **k)
    )
    with pytest.raises(SystemExit, match="dead"):
        _drain(outbox, batch_events=1000)
    monkeypatch.undo()
    _drain(outbox)
    _assert_once(outbox, 9_000)
    for found in numbers_by_key(outbox.messages()).values():
        assert found == sorted(found)


@pytest.mark.extended
def test_a_crash_after_a_commit_behind_a_batch_that_was_refused(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a record that passes over a refused event which no table has: it would be lost."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    # One tick in two batches, one transaction for each.
    write(outbox, ("a", {"noise": NOISE}), ("b", {"n": 0}))
    monkeypatch.setattr(TransactionalPublisher, "takes", lambda self, batch: not self._deliveries)
    settle, committed, is_dead = Shard.settle, TransactionalPublisher._committed, threading.Event()

    def slow(self: Shard, *given: Any, **more: Any) -> Any:
        if more.get("last") or (more.get("parked") and is_dead.wait(2.0)):
            raise SystemExit("dead")
        return settle(self, *given, **more)

    def dying(self: TransactionalPublisher) -> None:
        committed(self)
        is_dead.set()
        raise SystemExit("dead")

    monkeypatch.setattr(Shard, "settle", slow)
    monkeypatch.setattr(TransactionalPublisher, "_committed", dying)
    monkeypatch.setattr(TransactionalPublisher, "discard", lambda self: None)
    with pytest.raises(SystemExit, match="dead"):
        _drain(outbox, batch_events=1, max_attempts=1)
    monkeypatch.undo()
    _drain(outbox, max_attempts=1)
    assert keys(outbox) == ["b"]
    assert [row[0] for row in parked_rows(outbox)] == ["a"]


def test_a_rejected_event_is_parked_and_its_batch_is_not(outbox: Outbox) -> None:
    """Guards against a refusal that aborts without end, or loses what was in the transaction."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    events: list[tuple[str, Any]] = [(str(n % 7), {"n": n}) for n in range(300)]
    events.insert(150, ("guilty", {"n": -1, "noise": NOISE}))
    events.append(("guilty", {"n": -2}))
    write(outbox, *events)
    with running(quick(outbox, max_attempts=3, **ONCE)):
        wait_until(lambda: [row[2:] for row in parked_rows(outbox)] == [("failed", 3)], seconds=60)
        wait_until(lambda: numbers(outbox, "guilty") == [-2], what="the aggregate to go on")
    _assert_once(outbox, 301)


@pytest.mark.parametrize("asked", either(True, False))
def test_a_corrected_topic_accepts_parked_events_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Guards against a retry outside of the transactions: a crash would double it."""
    if not asked:
        monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0}), ("a", {"n": 1, "noise": NOISE}), ("a", {"n": 2}), ("b", {"n": 0}))
    with running(quick(outbox, max_attempts=1000, **ONCE)):
        wait_until(lambda: len(parked_rows(outbox)) == 2 and parked_rows(outbox)[0][3] > 1, seconds=60)
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        wait_until(
            lambda: numbers(outbox, "a") == [0, 1, 2], seconds=60, what="the event and those behind it"
        )
        write(outbox, ("a", {"n": 3}))
        wait_until(lambda: numbers(outbox, "a") == [0, 1, 2, 3])
        wait_until(lambda: parked_rows(outbox) == [])
    _assert_once(outbox, 5)


@pytest.mark.extended
def test_a_replayed_dead_letter_comes_once(outbox: Outbox) -> None:
    """Guards against a replay that is published twice, or never."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
    with running(quick(outbox, max_attempts=1, **ONCE)):
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed"])
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        assert outbox.outbox("dead-letters", "replay", "--all", "--reason", "mended", "--yes").returncode == 0
        wait_until(lambda: numbers(outbox, "a") == [1, 0], what="the late one")
        wait_until(lambda: parked_rows(outbox) == [])
    _assert_once(outbox, 2)


@pytest.mark.extended
def test_from_at_least_once_and_back(outbox: Outbox) -> None:
    """Guards against a change of the mode that loses or doubles, also within a tick."""
    outbox.fill(3_000)
    service.relay(outbox.settings, until_empty=True)
    for _ in range(3):
        outbox.fill(3_000)
        _drain(outbox)
        outbox.write(1)
        service.relay(outbox.settings, until_empty=True)
    _assert_once(outbox, 12_003)


@pytest.mark.extended
def test_shards_change_without_a_duplicate(outbox: Outbox) -> None:
    """Guards against a record of an old shard that a new one believes, or misses."""
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    with relays(outbox, 3, **ONCE):
        writers = Writers(outbox.settings.dsn, seed, 3)
        for wanted in (2, 3, 1, 2):
            resharding.change(outbox.settings, wanted)
            wait_for_holders(outbox, wanted)
            faults.wait_for_more(faults.published(outbox), 20)
        writers.stop()
        wait_until_relayed(outbox)
    found = verdict(outbox, calm=True)
    assert found.wrong == []
    assert found.committed > 0


@pytest.mark.thorough
def test_kill_9_again_and_again_under_load(outbox: Outbox, is_short: bool, is_thorough: bool) -> None:
    """Guards G5: at no instant does a crash lose, duplicate or reorder what a consumer sees."""
    seed = faults.seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        business.prepare(connection)
    writers = Writers(outbox.settings.dsn, seed, 3)
    published = faults.published(outbox)
    for _ in range(50 if is_thorough else 3 if is_short else 10):
        before = published()
        with faults.relay(outbox, **ENVIRONMENT) as relay:
            if chance.random() < 0.7:
                wait_until(lambda before=before: published() > before, seconds=60)  # type: ignore[misc]
            with pytest.raises(Exception, match="timed out"):
                relay.wait(chance.random() * 0.2)
            relay.kill()
    writers.stop()
    faults.drain(outbox, quick(outbox, **ONCE))
    found = verdict(outbox, calm=True)
    assert found.wrong == []
    assert found.committed > (10 if is_short else 100)


def test_a_frozen_relay_is_fenced(outbox: Outbox) -> None:
    """Guards against a relay that resumes and publishes at the same time as its successor."""
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    writers = Writers(outbox.settings.dsn, seed, 3)
    with faults.relay(outbox, **ENVIRONMENT) as frozen:
        faults.wait_for_more(faults.published(outbox), 20)
        with faults.relay(outbox, **ENVIRONMENT):
            frozen.send_signal(signal.SIGSTOP)
            faults.wait_for_more(faults.published(outbox), 200, seconds=60)
            frozen.send_signal(signal.SIGCONT)
            faults.wait_for_more(faults.published(outbox), 100, seconds=60)
    writers.stop()
    faults.drain(outbox, quick(outbox, **ONCE))
    assert verdict(outbox, calm=True).wrong == []


@pytest.mark.extended
def test_the_database_restarts_between_kafkas_commit_and_the_settle(
    own_servers: tuple[Postgres, Kafka, Outbox],
) -> None:
    """Guards against a position that is believed although Kafka is further."""
    postgres, _, outbox = own_servers
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    with faults.relay(outbox, **ENVIRONMENT) as relay:
        writers = Writers(outbox.settings.dsn, seed, 3)
        for n in range(3):
            faults.wait_for_more(faults.published(outbox), 20, seconds=60)
            (postgres.kill if n % 2 else postgres.stop)()
            postgres.start()
        faults.wait_for_more(faults.published(outbox), 20, seconds=60)
        writers.stop()
        wait_until_relayed(outbox)
        assert relay.poll() is None
    assert verdict(outbox, calm=True).wrong == []


def test_all_relays_ask_for_the_same_partitions(outbox: Outbox) -> None:
    """Guards against a change of the number of shards that is abandoned because another relay was first."""
    for _ in range(3):
        name = outbox.topic(uuid4().hex)
        progress_topic.create_topic(outbox.settings, name, 1)
        with ThreadPoolExecutor(8) as relays_of_all_shards:
            asked = [
                relays_of_all_shards.submit(progress_topic.create_topic, outbox.settings, name, 8)
                for _ in range(8)
            ]
        assert [each.exception() for each in asked] == [None] * 8


def test_a_broker_that_stands_still_at_the_start(
    own_servers: tuple[Postgres, Kafka, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that ends with a traceback since the progress topic was not made in time."""
    _, kafka, outbox = own_servers
    monkeypatch.setattr(progress_topic, "_SECONDS", 0.5)
    kafka.freeze()
    try:
        with pytest.raises(UnavailableError, match="the progress topic p cannot be created"):
            progress_topic.create_topic(outbox.settings, "p", 1)
        monkeypatch.setattr(progress_topic, "_GRACE_SECONDS", -0.4)
        with pytest.raises(UnavailableError, match="the progress topic p cannot be created"):
            progress_topic.create_topic(outbox.settings, "p", 1)
    finally:
        kafka.thaw()


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("All brokers are currently fenced.", UnavailableError),
        ("The target replication factor of 3 cannot be reached: 1 broker(s) are registered.", SetupError),
    ],
    ids=["brokers that start", "too few brokers"],
)
def test_brokers_that_cannot_replicate(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, says: str, error: type[Exception]
) -> None:
    """Guards against a relay that gives up because it starts together with its brokers."""
    answer: Future[None] = Future()
    answer.set_exception(KafkaException(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR, says)))
    admin = SimpleNamespace(create_topics=lambda *_, **__: {"p": answer})
    monkeypatch.setattr(progress_topic, "AdminClient", lambda *_, **__: admin)
    with pytest.raises(error, match=r"replication|fenced"):
        progress_topic.create_topic(outbox.settings, "p", 1)


@pytest.mark.extended
def test_records_that_no_relay_wrote_are_passed_over(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a relay that cannot start because another writer wrote to the progress topic; against
    events published again because the relay does not look for its own record behind the foreign ones."""
    outbox.fill(2_000, aggregates=10)
    commit, settle = TransactionalPublisher._commit, Shard.settle
    topics: set[str] = set()

    def dying(self: TransactionalPublisher) -> None:
        commit(self)
        assert isinstance(self._producer, FencingProducer)
        topics.add(self._producer._kafka_names.topic)
        if self._phase is Phase.NONE:
            raise SystemExit("dead")

    monkeypatch.setattr(TransactionalPublisher, "_commit", dying)
    monkeypatch.setattr(TransactionalPublisher, "discard", lambda self: None)
    monkeypatch.setattr(
        Shard, "settle", lambda self, *a, **k: None if k.get("last") else settle(self, *a, **k)
    )
    with pytest.raises(SystemExit, match="dead"):
        _drain(outbox)
    monkeypatch.undo()
    with outbox.connect() as connection:
        ((tick,),) = connection.execute("SELECT tick_id::text FROM outbox_shards").fetchall()
    (topic,) = topics
    right = {"tick": tick, "last_seq": 1, "finished": True, "released": []}
    wrong = [
        *({**right, **part} for part in ({"last_seq": "x"}, {"last_seq": 2**70}, {"last_seq": None})),
        *({**right, **part} for part in ({"finished": "no"}, {"released": 7}, {"released": ["1"]})),
        *({**right, **part} for part in ({"tick": [tick]}, {"more": 1}, {"last_seq": -1})),
        *([right], "right", 1, None),
    ]
    foreign = [None, b"", b"\xff\xfe", b"no JSON", b"[" * 6_000, *(json.dumps(one).encode() for one in wrong)]
    producer = Producer({"bootstrap.servers": outbox.settings.kafka})
    for value in foreign:
        producer.produce(topic, value, "other", partition=0)
    assert producer.flush(20) == 0
    with caplog.at_level("WARNING", "outbox_pipelines"):
        _drain(outbox)
    _assert_once(outbox, 2_000)
    assert f"{len(foreign)} records of the progress topic {topic}, partition 0, that no relay" in caplog.text


@pytest.mark.parametrize("look_back", either(1_000, 1))
def test_the_last_record_is_found_however_far_back(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, look_back: int
) -> None:
    """Guards against a record that counts as absent because aborted transactions lie behind it: a tick that
    Kafka has committed would be published again."""
    monkeypatch.setattr(progress_topic, "_LOOK_BACK", look_back)
    name = outbox.topic(uuid4().hex)
    progress_topic.create_topic(outbox.settings, name, 1)
    last = Record("tick", 7, finished=True)
    producer = Producer({"bootstrap.servers": outbox.settings.kafka})
    for value in (Record("tick", 6, finished=False).encode(), last.encode(), *[None] * 1_500):
        producer.produce(name, value, "0", partition=0)
    assert producer.flush(30) == 0
    aborted = Producer({"bootstrap.servers": outbox.settings.kafka, "transactional.id": name})
    aborted.init_transactions(30)
    aborted.begin_transaction()
    aborted.produce(name, Record("tick", 8, finished=True).encode(), "0", partition=0)
    assert aborted.flush(30) == 0
    aborted.abort_transaction(30)
    assert progress_topic.read_last(outbox.settings, name, 0, Record.decode) == last


@pytest.mark.parametrize("within_a_tick", either(True, False))
def test_a_restored_position_doubles_and_never_loses(outbox: Outbox, within_a_tick: bool) -> None:
    """Guards against Kafka's record being believed by a database that is older."""
    outbox.fill(1_000)
    _drain(outbox)
    with outbox.connect() as connection:
        old = connection.execute("SELECT done::text, tick_id FROM outbox_shards").fetchone()
        outbox.fill(1_000)
        _drain(outbox)
        assert old is not None
        connection.execute("UPDATE outbox_shards SET done = %s, tick_id = %s", old)
        if within_a_tick:
            connection.execute("UPDATE outbox_shards SET target = pg_current_snapshot(), last_seq = 0")
    outbox.fill(500)
    _drain(outbox)
    messages = outbox.messages()
    assert len({message.headers["id"] for message in messages}) == 2_500
    assert len(messages) == 3_500


def test_a_crash_between_parking_and_the_commit(outbox: Outbox) -> None:
    """Guards against an event that is parked ahead of the position, read again, and published both ways."""
    write(outbox, ("a", {"n": 0}), ("a", {"n": 1}), ("b", {"n": 0}))
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, CASE WHEN seq = (SELECT min(seq) FROM outbox) "
            "THEN 'retrying' ELSE 'waiting' END, 0, now(), 'its batch was refused' "
            "FROM outbox WHERE aggregate_id = 'a'"
        )
    with running(quick(outbox, **ONCE)):
        wait_until(lambda: parked_rows(outbox) == [], what="nothing parked")
        wait_until_relayed(outbox)
    _assert_once(outbox, 3)
    assert numbers(outbox, "a") == [0, 1]


def test_aborted_events_are_not_seen(outbox: Outbox) -> None:
    """Guards against a reader of these tests that would not notice a transaction."""
    outbox.write("x")
    _drain(outbox)
    assert keys(outbox) == ["x"]


def test_a_run_that_is_released_ends_where_the_position_does(outbox: Outbox) -> None:
    """Guards against the same further behind: the head is covered, and one behind it was parked ahead."""
    write(outbox, ("a", {"n": 0}), ("a", {"n": 1}))
    service.relay(outbox.settings, until_empty=True)
    write(outbox, ("a", {"n": 2}))
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, 'waiting', 0, NULL, 'aside', now(), NULL FROM outbox"
        )
        names: dict[str, Any] = {"types": ["order"], "ids": ["a"], "shard": 0, "limit": 10}
        names |= {"blocks": False, "event_blocks": "{}", "aggregate_blocks": "{}"}
        free = connection.execute(parking_sql.FREE, names).fetchall()
        written = connection.execute("SELECT seq FROM outbox ORDER BY seq").fetchall()
    assert [row[0] for row in free] == [seq for (seq,) in written[:2]]
