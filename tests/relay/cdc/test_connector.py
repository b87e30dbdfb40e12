"""A connector in place of the relay, played by the test: it reads the slot, publishes, may confirm."""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import make_conninfo

from outbox_pipelines import schema
from outbox_pipelines.debezium import registration
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.event import Event
from outbox_pipelines.position import Snapshot
from outbox_pipelines.relay.cdc import cutover, pgoutput, queries
from outbox_pipelines.relay.cdc.connector import to_connector
from outbox_pipelines.relay.cdc.followed import FollowedSource
from outbox_pipelines.relay.cdc.status import read
from outbox_pipelines.relay.kafka.encoding import Encoder
from outbox_pipelines.secret import Secret
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import Outbox, clean_environment, wait_until
from tests.relay.cdc.connect import played
from tests.relay.cdc.slots import make
from tests.relay.cdc.test_switch import MODES, is_read, writing
from tests.relay.parked import numbers_by_key, parked_rows, write
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import NOISE, create_topic

Admin = psycopg.Connection[Any]

_CHANGES = (
    "SELECT lsn - '0/0', data FROM {}(%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s)".format(
        "pg_logical_slot_peek_binary_changes"
    )
)


def _state(outbox: Outbox) -> str | None:
    with outbox.connect() as connection:
        row = connection.execute(queries.CONNECTOR).fetchone()
    assert row is not None
    state: str | None = row[1]
    return state


def _position(admin: Admin) -> Snapshot:
    row = admin.execute("SELECT done::text FROM outbox_shards").fetchone()
    assert row is not None
    return Snapshot.parse(row[0])


def _hand_over(outbox: Outbox, settings: Settings) -> None:
    if _state(outbox) is None:
        wait_until(lambda: is_read(settings), what="a relay reads the slot")
    with outbox.connect() as admin:
        admin.execute(queries.BEGIN_CONNECTOR, {"connector": "shop"})
    wait_until(lambda: _state(outbox) == "publishes", what="the relay has left the slot")


def _delivered(admin: Admin, slot: str) -> list[tuple[int, list[Event]]]:
    """What the slot delivers now: the end of each transaction in the log, and its events."""
    decoder = pgoutput.Decoder(with_time=False)
    found: list[tuple[int, list[Event]]] = []
    events: list[Event] = []
    for _, message in admin.execute(_CHANGES, [slot, slot]):
        if message[0] == pgoutput.RELATION:
            decoder.relation(message)
        elif message[0] == pgoutput.INSERT:
            events.append(decoder.row(message, 1 << 30)[0])
        elif message[0] == pgoutput.COMMIT:
            found.append((pgoutput.end_of_commit(message), events))
            events = []
    return found


def _publish(settings: Settings, events: list[Event]) -> None:
    producer = Producer({"bootstrap.servers": settings.kafka})
    encode = Encoder(settings).encode
    for event in events:
        value, headers = encode(event)
        producer.produce(
            settings.topic.format(aggregate_type=event.aggregate_type),
            value,
            event.aggregate_id,
            headers=headers,
        )
    assert producer.flush(30) == 0


def _confirm(admin: Admin, slot: str, position: int) -> None:
    admin.execute("SELECT pg_replication_slot_advance(%s, '0/0'::pg_lsn + %s::numeric)", [slot, position])


@pytest.mark.parametrize("delivery", MODES)
def test_the_connector_begins_where_the_relay_has_stopped(outbox: Outbox, delivery: str) -> None:
    """Guards against a gap or a repetition between the two, and a position ahead of what is published."""
    settings = quick(outbox, delivery=delivery)
    create_topic(outbox)
    slot = make(outbox)
    with running(settings), outbox.connect() as admin:
        for turn in range(3):
            with writing(outbox) as counts:
                _hand_over(outbox, settings)
                before, sent = _position(admin), len(outbox.messages())
                wait_until(lambda: len(_delivered(admin, slot)) > 9, what="events for the connector")
            delivered = _delivered(admin, slot)
            assert len(outbox.messages()) == sent
            assert _position(admin) == before
            # One confirmed, one published and not confirmed, one half published; nothing of the others.
            _publish(settings, [*delivered[0][1], *delivered[1][1], *delivered[2][1][:1]])
            _confirm(admin, slot, delivered[0][0])
            admin.execute(queries.END_CONNECTOR)
            wait_until(lambda: _state(outbox) is None, what="the relay continues")
            wait_until_relayed(outbox)
            found = numbers_by_key(outbox.messages())
            half = delivered[2][1][0].aggregate_id
            if turn == 0:
                whole = {key: sorted(set(numbers)) for key, numbers in found.items()}
                assert whole == {key: list(range(count)) for key, count in counts.items()}
                # A transaction of which a part is there is published again, as a whole.
                assert len(found.pop(half)) == counts[half] + 1
                assert all(len(numbers) == counts[key] for key, numbers in found.items())
            wait_until(lambda: is_read(settings), what="the relay reads the slot again")


_DYING = """
import os, signal, sys
import psycopg
from outbox_pipelines.relay.cdc import queries
deadly, when = getattr(queries, sys.argv[1]), sys.argv[2]
execute = psycopg.Connection.execute
def dying(self, query, *arguments, **named):
    if query == deadly and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    done = execute(self, query, *arguments, **named)
    if query == deadly and when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return done
psycopg.Connection.execute = dying
sys.argv = ["outbox", "relay"]
from outbox_pipelines.__main__ import main
main()
"""


@pytest.mark.parametrize("delivery", MODES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("statement", ["LEFT", "TAKEN_BACK"])
def test_a_relay_that_dies_at_the_change(outbox: Outbox, statement: str, when: str, delivery: str) -> None:
    """Guards against a change of which one half is forgotten: both would publish, or nobody."""
    settings = quick(outbox, delivery=delivery)
    create_topic(outbox)
    slot = make(outbox)

    def die() -> None:
        done = forks.run(
            [sys.executable, "-c", _DYING, statement, when],
            env=clean_environment() | outbox.environment | {"OUTBOX_DELIVERY": delivery},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    write(outbox, *[("a", {"n": n}) for n in range(5)])
    with outbox.connect() as admin:
        if statement == "LEFT":
            admin.execute(queries.BEGIN_CONNECTOR, {"connector": "shop"})
            die()
            # Of the half that the dead relay has begun.
            write(outbox, *[("a", {"n": n}) for n in range(5, 8)])
        with running(settings):
            _hand_over(outbox, settings)
        write(outbox, ("a", {"n": 8 if statement == "LEFT" else 5}))
        last = 9 if statement == "LEFT" else 6
        delivered = _delivered(admin, slot)
        _publish(settings, [event for _, events in delivered for event in events])
        write(outbox, ("a", {"n": last}))
        admin.execute(queries.END_CONNECTOR)
        if statement == "TAKEN_BACK":
            die()
        with running(settings):
            wait_until(lambda: _state(outbox) is None, what="the relay continues")
            wait_until_relayed(outbox)
    assert numbers_by_key(outbox.messages()) == {"a": list(range(last + 1))}


def test_the_position_follows_what_is_confirmed(outbox: Outbox) -> None:
    """Guards against days that are never closed, or are closed before their events are in Kafka."""
    slot = make(outbox)
    with outbox.connect() as admin, outbox.connect() as connection:
        source = FollowedSource(connection, slot, _position(admin))
        first = _transaction(admin, write(outbox, ("a", {"n": 0}))[0])
        # The log goes on behind it.
        _end(admin)
        assert source.read() is None
        second = _transaction(admin, write(outbox, ("a", {"n": 1}))[0])
        (end, _), (_, _) = _delivered(admin, slot)
        _confirm(admin, slot, end)
        assert source.read() is None
        # As a connector does that has nothing more to publish.
        _confirm(admin, slot, _end(admin))
        batch = source.read()
        assert batch is not None
        assert (batch.events, batch.ends_tick) == ([], True)
        assert batch.target.sees(first)
        assert not batch.target.sees(second)
        third = _transaction(admin, write(outbox, ("a", {"n": 2}))[0])
        assert source.read() is None
        _confirm(admin, slot, _end(admin))
        batch = source.read()
        assert batch is not None
        assert batch.target.sees(second)
        assert batch.target.sees(third)
        admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        write(outbox, ("a", {"n": 3}))
        assert source.read() is None


@pytest.mark.parametrize("delivery", MODES)
def test_a_connector_whose_slot_is_lost(outbox: Outbox, delivery: str) -> None:
    """Guards against events that nobody publishes, and against all of them once more, when a slot is lost."""
    settings = quick(outbox, delivery=delivery)
    create_topic(outbox)
    slot = make(outbox)
    with running(settings), outbox.connect() as admin:
        _hand_over(outbox, settings)
        for n in range(4):
            write(outbox, ("a", {"n": n}), ("b", {"n": n}))
        for _, events in _delivered(admin, slot)[:2]:
            _publish(settings, events)
        admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        (problem,) = read(settings).problems
        assert "of the connector shop is missing: run `outbox cutover --to polling`" in problem
        done = outbox.outbox("cutover", "--to", "polling", "--seconds", "30")
        assert done.returncode == 0, done.stderr
        wait_until_relayed(outbox)
        assert read(settings).source == "polling"
    assert numbers_by_key(outbox.messages()) == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}


def test_parked_events_keep_the_relay(outbox: Outbox) -> None:
    """Guards against a parked event that is published behind later ones of its aggregate."""
    settings = quick(outbox, max_attempts=1_000)
    create_topic(outbox, **{"max.message.bytes": "1000"})
    make(outbox)
    with running(settings), outbox.connect() as admin:
        wait_until(lambda: is_read(settings), what="a relay reads the slot")
        write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
        wait_until(lambda: len(parked_rows(outbox)) == 2, what="parked events")
        admin.execute(queries.BEGIN_CONNECTOR, {"connector": "shop"})
        wait_until(lambda: read(settings).error is not None, what="the reason")
        write(outbox, ("b", {"n": 0}))
        wait_until(lambda: len(outbox.messages()) == 1, what="a relay that goes on")
        assert _state(outbox) == "begins"
        (problem,) = read(settings).problems
        assert "shop was interrupted (2 events are parked" in problem
        done = outbox.outbox("cutover", "--to", "cdc", "--seconds", "30")
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "the relay keeps the slot")
        assert _state(outbox) is None


def test_a_slot_that_a_connector_reads_is_kept(outbox: Outbox) -> None:
    """Guards against a slot that is dropped under a connector."""
    settings = quick(outbox)
    make(outbox)
    with running(settings):
        _hand_over(outbox, settings)
        done = outbox.outbox("cdc", "drop")
        assert done.returncode == 2
        assert "the connector shop publishes what the slot delivers" in done.stderr
        assert read(settings).exists


def test_what_is_missing_is_said_before_anything_changes(outbox: Outbox) -> None:
    """Guards against a change that stops half-way because of a setting."""
    settings = quick(outbox)
    done = outbox.outbox("cutover", "--to", "debezium")
    assert done.returncode == 2
    assert "OUTBOX_CONNECT" in done.stderr
    done = outbox.outbox("cutover", "--to", "debezium", OUTBOX_CONNECT="http://127.0.0.1:1")
    assert done.returncode == 2
    assert "does not answer" in done.stderr
    assert read(settings).slot is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotReadyError("it does not run")])
def test_a_registration_that_fails_lets_the_relay_continue(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Guards against a change after which nothing is published."""

    def fail(*_: object, **__: object) -> None:
        raise error

    create_topic(outbox)
    monkeypatch.setattr(registration, "register", fail)
    with played(outbox.settings) as worker, running(quick(outbox)):
        settings = quick(outbox, connect=Secret(worker.url))
        make(outbox)
        wait_until(lambda: is_read(settings), what="a relay reads the slot")
        with pytest.raises(type(error)):
            to_connector(settings, {"password": ""}, seconds=20, say=lambda line: None)
        write(outbox, ("a", {"n": 0}))
        wait_until(lambda: _state(outbox) is None, what="the relay continues")
        wait_until_relayed(outbox)
    assert numbers_by_key(outbox.messages()) == {"a": [0]}


def _transaction(admin: Admin, event: object) -> int:
    row = admin.execute("SELECT tx::text::bigint FROM outbox WHERE id = %s", [event]).fetchone()
    assert row is not None
    return int(row[0])


def _end(admin: Admin) -> int:
    row = admin.execute(queries.END_OF_LOG).fetchone()
    assert row is not None
    return int(row[0])


def test_a_schema_whose_name_is_quoted(outbox: Outbox) -> None:
    """Guards against a publication that its own commands do not recognize, and a slot that is not read."""
    dsn = make_conninfo(outbox.settings.dsn, options='-csearch_path="My-Shop"')
    shop = Outbox(quick(outbox, db_schema="My-Shop", dsn=Secret(dsn)))
    schema.migrate(shop.settings)
    create_topic(shop)
    said: list[str] = []
    with played(shop.settings) as worker:
        settings = quick(shop, connect=Secret(worker.url))
        with running(settings):
            for n, target in enumerate(("cdc", "debezium", "polling")):
                cutover.run(settings, target, seconds=30, say=said.append, place={"password": ""})
                wait_until(lambda: not read(settings).changing, what="the end of the change")
                found = read(settings)
                assert (found.source, found.problems) == (target, [])
                write(shop, ("a", {"n": n}))
                wait_until(partial(_has, shop, n), what=f"an event from {target}")
    assert numbers_by_key(shop.messages()) == {"a": [0, 1, 2]}


def _has(outbox: Outbox, number: int) -> bool:
    return numbers_by_key(outbox.messages()).get("a") == list(range(number + 1))
