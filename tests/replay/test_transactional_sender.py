"""Replays in exactly_once: whatever ends, a reader of committed messages sees each event once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID

import pytest

from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay.kafka import client, transactional_producer
from outbox_pipelines.relay.kafka.transactional_producer import KafkaNames
from outbox_pipelines.relay.lease.shard_ownership import identity_of
from outbox_pipelines.replay import replays, transactional_sender
from outbox_pipelines.replay.replay_record import Replay
from outbox_pipelines.replay.selection import Selection
from outbox_pipelines.replay.sender import AgainError
from outbox_pipelines.replay.transactional_sender import Record
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox as Relayed
from tests.conftest import patience, wait_until
from tests.reconciliation.place import Place as Outbox
from tests.replay.test_replays import replayed, running, typed

EVENTS = 2_000
SAME = ("--same-topic", "--reason", "again")
ONCE = {"OUTBOX_DELIVERY": "exactly_once"}


@pytest.fixture
def once(place: Outbox) -> Settings:
    """Settings of exactly_once, with events that are published."""
    place.outbox.fill(EVENTS)
    place.relay()
    return place.settings.model_copy(update={"delivery": "exactly_once"})


def begin(settings: Settings, selection: Selection, **more: Any) -> Replay:
    """A replay into the same topics."""
    how: dict[str, Any] = {"rate": 1e9, "is_stopped": lambda: False, "progress": lambda *_: None, **more}
    return replays.begin(settings, selection, "{topic}", reason="again", actor="me", creates=False, **how)


def resume(settings: Settings, replay: UUID) -> Replay:
    return replays.resume(settings, replay, rate=1e9, is_stopped=lambda: False, progress=lambda *_: None)


def seen(place: Outbox) -> Counter[tuple[str | None, str | None]]:
    """How often each event of each replay is seen."""
    return Counter((each.headers["replay-id"], each.headers["id"]) for each in replayed(place))


@pytest.mark.extended
def test_replays_that_are_killed_send_each_event_once(place: Outbox, once: Settings) -> None:
    """Guards against events that are lost or come twice after a kill -9, at any time."""
    process = running(place, "--topic", place.topic, *SAME, "--rate", "300", **ONCE)
    process.kill()
    process.communicate()
    ((replay,),) = place.rows("SELECT id::text FROM outbox_replays")
    for rate in ("300", "400", "500"):
        process = running(place, "--resume", replay, "--rate", rate, **ONCE)
        process.kill()
        process.communicate()
    shown = typed(place, "--resume", replay, **ONCE)
    assert f"done  {EVENTS:,} of {EVENTS:,} sent" in shown.stdout, shown.stderr
    assert set(seen(place).values()) == {1}
    assert len(seen(place)) == EVENTS


@pytest.mark.extended
def test_a_broker_that_is_killed_and_comes_back(
    own_servers: tuple[Postgres, Kafka, Relayed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a replay that an outage of Kafka ends, and events that are lost or come twice by it."""
    _, kafka, relayed = own_servers
    place = Outbox(relayed, tmp_path)
    relayed.fill(EVENTS)
    place.relay()
    monkeypatch.setattr(replays, "_SAY_SECONDS", 0.1)
    settings = place.settings.model_copy(update={"delivery": "exactly_once"})
    latest: list[tuple[int, str]] = [(0, "")]
    stop = Event()
    with ThreadPoolExecutor(1) as threads:
        replaying = threads.submit(
            begin,
            settings,
            Selection(where="true"),
            rate=1_000,
            is_stopped=stop.is_set,
            progress=lambda _, sent, trouble: latest.append((sent, trouble)),
        )
        try:
            wait_until(lambda: latest[-1][0] or replaying.done(), what="a replay under way")
            kafka.kill()
            wait_until(lambda: latest[-1][1] or replaying.done(), what="that Kafka is away")
            assert latest[-1][0] < EVENTS
            kafka.start()
            found = replaying.result(patience(60))
        finally:
            stop.set()
    assert (found.state, found.sent) == ("done", EVENTS)
    assert set(seen(place).values()) == {1}
    assert len(seen(place)) == EVENTS


@pytest.mark.extended
def test_what_kafka_knows_counts_before_another_replay_begins(place: Outbox, once: Settings) -> None:
    """Guards against events that come twice, since another replay has hidden how far a killed one was."""
    stops = iter([False] * 8 + [True] * 10**6)
    first = begin(once, Selection(where="true"), rate=5_000, is_stopped=lambda: next(stops))
    assert first.state == "stopped"
    assert 0 < first.sent < EVENTS
    # As if it had been killed before it saved that.
    place.rows("UPDATE outbox_replays SET position = 0, sent = 0, state = 'running'")
    other = begin(once, Selection(where="seq % 10 = 0"))
    assert (other.state, other.sent) == ("done", other.events)
    (shown,) = place.rows("SELECT sent, state FROM outbox_replays WHERE id = %s", first.id)
    assert shown == (first.sent, "running")
    assert resume(once, first.id).sent == EVENTS
    assert set(seen(place).values()) == {1}
    assert len(seen(place)) == EVENTS + other.events


@pytest.mark.extended
def test_a_commit_that_was_asked_for_twice_brings_a_new_producer(
    place: Outbox, once: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a late request that ends the next transaction in the middle."""
    began = []
    original = transactional_producer.begin

    def spied(*arguments: Any, **options: Any) -> Any:
        began.append(arguments[1])
        return original(*arguments, **options)

    monkeypatch.setattr(transactional_sender, "begin", spied)
    monkeypatch.setattr(transactional_sender, "_MOST_EVENTS", 900)
    monkeypatch.setattr(client, "ASKED_ONCE_SECONDS", 0.0)
    assert begin(once, Selection(where="true")).sent == EVENTS
    assert len(began) > 2
    assert set(seen(place).values()) == {1}
    assert len(seen(place)) == EVENTS


def test_a_relay_is_not_fenced(place: Outbox, once: Settings) -> None:
    """Guards against a replay that ends the transactions of a relay."""
    with connect(once, name="test") as connection:
        identity = identity_of(connection, once.db_schema)
    relays = KafkaNames(f"outbox-{identity}-0", f"outbox-progress-{identity}", 0)
    relay = transactional_producer.begin(once, relays, print)
    relay.begin_transaction()
    relay.produce(place.topic, "{}", "k", headers=[("id", "live")])
    assert begin(once, Selection(where="seq < 20")).state == "done"
    relay.commit_transaction(30)
    assert "live" in {each.headers["id"] for each in place.messages()}


@pytest.mark.extended
def test_a_transaction_that_fails_is_sent_again(
    place: Outbox, once: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a position that passes events of an aborted transaction, and failures without end."""
    failing = [True] * 2

    def commit(self: Any) -> None:
        if failing and self._count > 100:
            failing.pop()
            raise AgainError
        committed(self)

    committed = transactional_sender.TransactionalSender._commit
    monkeypatch.setattr(transactional_sender.TransactionalSender, "_commit", commit)
    monkeypatch.setattr(transactional_sender, "_MOST_EVENTS", 500)
    assert begin(once, Selection(where="true")).sent == EVENTS
    assert not failing
    assert set(seen(place).values()) == {1}
    assert len(seen(place)) == EVENTS
    failing += [True] * 100
    with pytest.raises(SetupError, match=r"Kafka aborts every transaction.*--resume"):
        begin(once, Selection(where="true"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"7",
        b"[]",
        b"{}",
        b'{"replay": "x", "position": 1, "sent": 1}',
        b'{"replay": null, "sent": 1}',
    ],
)
def test_what_no_replay_wrote_is_no_record(value: bytes | None) -> None:
    """Guards against a foreign message that moves a replay."""
    assert Record.decode(value) is None
    own = Record("01a21924-ba13-760e-85c0-7786a622b10b", 5, 3)
    assert Record.decode(own.encode()) == own
    assert Record.decode(own.encode().replace(b": 5", b": -5")) is None
