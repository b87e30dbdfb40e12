"""Events that fail: retried in their order, finally dead letters, and never a delay for other events."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Final

import psycopg
import pytest
from confluent_kafka import Producer

from outbox_pipelines.consumer import Counts, Event
from outbox_pipelines.consumer import kafka_clients as ours
from outbox_pipelines.consumer.errors import ConsumerError
from outbox_pipelines.errors import SetupError
from tests import forks, kafka_clients
from tests.conftest import clean_environment, either, headers_of, patience, topic_prefix, wait_until
from tests.consumer.place import Place, effect, running, uuid7
from tests.relay.topic import create

Connection = psycopg.Connection[Any]
END_SESSIONS: Final = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"


class Picky:
    """A handler that fails at some events, so many times."""

    def __init__(self, *refused: int, times: int = 1_000) -> None:
        self.left = dict.fromkeys(refused, times)
        self.seen: list[int] = []

    def __call__(self, event: Event, connection: Connection) -> None:
        effect(event, connection)
        n = event.payload["n"]
        self.seen.append(n)
        if self.left.get(n, 0):
            self.left[n] -= 1
            raise ValueError(f"no customer {n}")


def orders(place: Place) -> dict[str, list[int]]:
    """The effects of each key, in their order."""
    return dict(place.rows("SELECT key, array_agg(n ORDER BY seq) FROM effects GROUP BY key"))


def test_a_key_waits_for_its_failed_event_and_others_do_not(place: Place) -> None:
    """Guards against a poisoned event that stops a consumer, and against one that is overtaken by its own."""
    place.load(40, keys=4)
    picky = Picky(8, times=2)
    consumer = place.bare(retry_seconds=0.5)
    consumer.on("order.placed")(picky)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0 and place.effects() == 40, what="all effects")
        counts = run.end()
    assert orders(place) == {str(key): list(range(key, 40, 4)) for key in range(4)}
    # All of the others came before its second attempt.
    second = [at for at, n in enumerate(picky.seen) if n == 8][1]
    assert {n for n in picky.seen[:second] if n % 4} == {n for n in range(40) if n % 4}
    assert counts == Counts(handled=40, received=8, failures=2)
    assert place.inbox() == {"processed": place.value("SELECT count(*)::int FROM inbox")}


class MuteError(Exception):
    """Of a library whose message cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_one_event_s(place: Place) -> None:
    """Guards against an exception that ends the consumer instead of its event."""
    place.load(1)
    consumer = place.bare(max_attempts=1)

    @consumer.on("order.placed")
    def handle(event: Event, connection: Connection) -> None:
        raise MuteError

    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
        assert run.end() == Counts(received=1, failures=1, dead_letters=1)
    assert place.value("SELECT last_error FROM inbox") == "MuteError: its text cannot be read"


@pytest.mark.parametrize("policy", either("continue", "block"))
def test_an_event_that_never_succeeds_is_a_dead_letter(place: Place, policy: str) -> None:
    """Guards against retries without end, and a policy that is not kept."""
    place.load(10, keys=1)
    consumer = place.bare(retry_seconds=0.05, max_attempts=3, on_dead_letter=policy)
    consumer.on("order.placed")(Picky(4))
    expected = [0, 1, 2, 3] + ([5, 6, 7, 8, 9] if policy == "continue" else [])
    with running(consumer) as run:
        wait_until(
            lambda: orders(place) == {"0": expected} and place.inbox().get("failed"), what="a dead letter"
        )
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = run.end()
    assert (counts.failures, counts.dead_letters) == (3, 1)
    assert place.inbox().get("waiting", 0) == (0 if policy == "continue" else 5)
    [(attempts, error, payload)] = place.rows(
        "SELECT attempts, last_error, payload FROM inbox WHERE state = 'failed'"
    )
    assert (attempts, error, json.loads(payload)) == (3, "ValueError: no customer 4", {"n": 4})


@pytest.mark.extended
def test_what_is_behind_a_dead_letter_waits_for_other_members_too(place: Place) -> None:
    """Guards against a block that is forgotten with the process that made it."""
    place.load(3, keys=1)
    for _ in range(2):
        consumer = place.bare(retry_seconds=0, max_attempts=1, on_dead_letter="block")
        consumer.on("order.placed")(Picky(0))
        with running(consumer) as run:
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            run.end()
        place.load(3, first=3, keys=1)
    assert place.effects() == 0
    assert place.inbox() == {"failed": 1, "waiting": 5}


def test_a_message_that_is_no_event_is_a_dead_letter(place: Place) -> None:
    """Guards against messages that are skipped in silence, or that stop all behind them."""
    place.put('{"hello": 1}', key="9")
    place.load(3)
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0 and place.effects() == 3, what="the others")
        assert run.end() == Counts(handled=3, failures=1, dead_letters=1)
    [(error,)] = place.rows("SELECT last_error FROM inbox WHERE state = 'failed'")
    assert f"at {place.topic}, partition " in error
    assert "offset 0 is not an event: it has no header 'id' and its value is" in error


@pytest.mark.extended
def test_a_copy_of_a_dead_letter_goes_to_a_topic(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = f"{topic_prefix()}-dead"
    made: list[tuple[dict[str, Any], logging.Logger]] = []

    def producer(given: dict[str, Any], *, logger: logging.Logger) -> Any:
        made.append((given, logger))
        return Producer(given, logger=logger)

    monkeypatch.setattr(ours, "Producer", producer)
    [event_id] = place.send(uuid7(), tenant="acme")
    consumer = place.bare(retry_seconds=0, max_attempts=2, dead_letter_topic=copies)
    consumer.on("order.placed")(Picky(0))
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"failed": 1}, what="a dead letter")
        run.end()
    reader = kafka_clients.Consumer(
        {"bootstrap.servers": place.kafka, "group.id": copies, "auto.offset.reset": "earliest"}
    )
    try:
        reader.subscribe([copies])
        message = reader.poll(60)
        assert message is not None
        assert (message.key(), message.value()) == (b"0", b'{"n": 0}')
        headers = {name: value.decode() for name, value in headers_of(message) if value is not None}
    finally:
        reader.close()
    assert headers["id"] == event_id
    assert headers["tenant"] == "acme"
    assert {name: text for name, text in headers.items() if name.startswith("dead-letter-")} == {
        "dead-letter-reason": "ValueError: no customer 0",
        "dead-letter-attempts": "2",
        "dead-letter-source": "billing",
        "dead-letter-topic": place.topic,
        "dead-letter-partition": str(place.value("SELECT partition FROM inbox")),
        "dead-letter-offset": str(place.value('SELECT "offset" FROM inbox')),
    }
    # Without the client's own repetitions, in the partition of the key, and not waited for without end.
    settings = {"enable.idempotence": True, "partitioner": "murmur2_random", "delivery.timeout.ms": 10_000}
    assert made == [({"bootstrap.servers": place.kafka} | settings, ours.CLIENT_LOG)]


@pytest.mark.extended
def test_a_dead_letter_waits_for_its_copy(place: Place) -> None:
    """Guards against a dead letter that is reported nowhere, because its topic was refused."""
    place.send(uuid7())
    small = f"{place.topic}-small"
    create(place.kafka, small, 1, **{"max.message.bytes": "1"})
    consumer = place.bare(retry_seconds=0, max_attempts=1, dead_letter_topic=small)
    consumer.on("order.placed")(Picky(0))
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"waiting": 1} and place.uncommitted() == 0, what="a refusal")
        row = place.value("SELECT xmin::text FROM inbox")
        wait_until(lambda: place.value("SELECT xmin::text FROM inbox") != row, what="another look")
        assert run.end().dead_letters == 0
    assert place.value("SELECT last_error FROM inbox") == "ValueError: no customer 0"


def service(place: Place, n: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.consumer.killer", place.dsn, place.kafka, place.topic, str(n)]
    return forks.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True)


def test_an_event_that_ends_the_process_is_found(place: Place) -> None:
    """Guards against a service that restarts without end at one event."""
    place.load(40, keys=10)
    deaths = 0
    while place.inbox().get("failed", 0) == 0:
        process = service(place, 17)
        wait_until(
            lambda: process.poll() is not None or place.inbox().get("failed"),  # noqa: B023
            what="an end",
        )
        if process.poll() is None:
            process.terminate()
        _, errors = process.communicate(timeout=600)
        assert process.returncode in (0, -signal.SIGKILL), errors
        deaths += process.returncode == -signal.SIGKILL
        assert deaths <= 4
    # Once when the event is first received, and then twice when it is looked for.
    assert 2 <= deaths <= 3
    process = service(place, 17)
    wait_until(lambda: place.effects() == 39, what="all others")
    # Before that, SIGTERM would find a process that does not listen yet.
    connected = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name ~ '^consumer'"
    )
    wait_until(lambda: place.value(connected) > 0, what="a consumer at work")
    process.terminate()
    assert process.wait(600) == 0
    assert orders(place) == {str(key): [n for n in range(key, 40, 10) if n != 17] for key in range(10)}
    [(error,)] = place.rows("SELECT last_error FROM inbox WHERE state = 'failed'")
    assert error == "the process ended while it handled the message"


@pytest.mark.parametrize("how", either("caught", "python", "database"))
def test_a_handler_that_hangs_is_interrupted(place: Place, how: str) -> None:
    """Guards against a handler that never returns, and whose group lacks its partitions for as long.

    If it catches the interruption and returns, its event must not count as handled.
    """
    place.load(3, keys=3)
    command = [sys.executable, "-m", "tests.consumer.hanger", place.dsn, place.kafka, place.topic, how]
    process: forks.Popen[str] = forks.Popen(
        command, env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: place.inbox().get("failed"), what="a dead letter")
        wait_until(lambda: place.effects() == 2, what="the others")
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    [(error,)] = place.rows("SELECT last_error FROM inbox WHERE state = 'failed'")
    assert "took longer than 0.5 s and was interrupted" in error


@pytest.mark.extended
def test_slow_calls_in_a_row_cost_no_partition(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a process that has left its group although none of its calls took too long."""
    place.send(uuid7(), uuid7(), keys=1)
    kafka = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000}
    consumer = place.bare(kafka=kafka)
    calls: list[int] = []

    @consumer.on("order.placed", batch=1)
    def slow(events: list[Event], connection: Connection) -> None:
        calls.append(len(events))
        connection.execute("SELECT pg_sleep(3.5)")
        for event in events:
            effect(event, connection)

    with running(consumer) as run:
        wait_until(lambda: place.effects() == 2, what="both effects")
        wait_until(lambda: place.uncommitted() == 0, what="their offsets")
        assert run.end() == Counts(handled=2)
    assert calls == [1, 1]
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_an_unavailable_database_is_waited_for(place: Place) -> None:
    """Guards against a consumer that ends, skips or counts an attempt while the database restarts."""
    place.load(2000)
    cut = threading.Event()

    def connect() -> Connection:
        if cut.is_set():
            raise psycopg.OperationalError("away")
        return psycopg.connect(place.dsn, autocommit=True, application_name=place.topic)

    consumer = place.bare(connect=connect, retry_seconds=0)
    consumer.on("order.placed")(effect)
    with running(consumer) as run:
        for _ in range(3):
            before = place.effects()
            wait_until(lambda: place.effects() >= before + 20, what="some effects")  # noqa: B023
            cut.set()
            # A session may still commit after the signal, or have begun to connect before.
            wait_until(lambda: not place.rows(END_SESSIONS, place.topic), what="no session")
            halted = place.effects()
            with pytest.raises(AssertionError):
                wait_until(lambda: place.effects() > halted, seconds=0.5)  # noqa: B023
            assert run.thread.is_alive()
            cut.clear()
        wait_until(lambda: place.effects() == 2000, seconds=60, what="all effects")
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = run.end()
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == 2000
    assert counts.dead_letters == 0
    for numbers in orders(place).values():
        assert numbers == sorted(numbers)


def test_a_stop_while_the_database_is_unavailable(place: Place) -> None:
    place.send(uuid7())
    connections: list[Connection] = []

    def connect() -> Connection:
        if connections:
            raise psycopg.OperationalError("away")
        connections.append(psycopg.connect(place.dsn, autocommit=True))
        return connections[0]

    consumer = place.bare(connect=connect)
    consumer.on("order.placed")(lambda _, connection: connection.close())
    with running(consumer) as run:
        wait_until(lambda: connections and connections[0].closed, what="an outage")
        before = time.monotonic()
        run.end()
    assert time.monotonic() - before < patience(10)
    assert place.uncommitted() == 1


def test_tables_that_refuse_end_it(place: Place) -> None:
    """Guards against a consumer that waits without end for a right that is not granted."""
    place.send(uuid7())
    place.rows("ALTER TABLE inbox RENAME COLUMN key TO name")
    with running(place.consumer()) as run, pytest.raises(ConsumerError, match="tables cannot be used"):
        run.wait()


def test_missing_tables_are_reported_before_the_first_event(place: Place) -> None:
    place.rows("DROP TABLE inbox")
    with running(place.consumer()) as run, pytest.raises(SetupError, match="outbox consumer migrate"):
        run.wait()


def test_a_deadlock_is_tried_again_at_once(place: Place) -> None:
    """Guards against an event that waits for its second attempt because another transaction was chosen."""
    place.send(uuid7())
    times: list[int] = []

    def handler(event: Event, connection: Connection) -> None:
        effect(event, connection)
        times.append(1)
        if len(times) < 3:
            connection.execute("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = 'deadlock_detected'; END $$")

    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 1, what="its effect")
        assert run.end() == Counts(handled=1)
