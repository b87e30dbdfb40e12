"""Rejections: the guilty event is found and held with its aggregate alone, everything else flows (G3, G4)."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from outbox_pipelines.relay import service
from outbox_pipelines.relay.prober import Prober
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit
from tests.conftest import Message, Outbox, read_topic, wait_until
from tests.relay.topic import NOISE, create_topic


def _change(outbox: Outbox, **config: str) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

    admin = AdminClient({"bootstrap.servers": outbox.settings.kafka})
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, outbox.topic(), incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(10)


def _write(outbox: Outbox, *events: tuple[str, Any]) -> list[str]:
    """One transaction with these (aggregate id, payload); their ids."""
    with outbox.connect(autocommit=False) as connection:
        return [str(emit(connection, "order", key, "order.placed", payload).id) for key, payload in events]


def _quick(outbox: Outbox, **more: object) -> Settings:
    return outbox.settings.model_copy(update={"retry_seconds": 0.05, **more})


def _drain(outbox: Outbox, **more: object) -> service.Totals:
    return service.relay(_quick(outbox, **more), until_empty=True)


@contextmanager
def _running(settings: Settings) -> Iterator[None]:
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
        relay.join(30)
    assert failures == []
    assert not relay.is_alive()


def _parked(outbox: Outbox) -> list[tuple[Any, ...]]:
    with outbox.connect() as connection:
        return connection.execute(
            "SELECT aggregate_id, id::text, state, attempts FROM outbox_parked ORDER BY seq"
        ).fetchall()


def _keys(outbox: Outbox) -> list[str]:
    return [message.key for message in outbox.messages()]


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that may not ask for the topics' limits: it learns of them by refusals."""
    monkeypatch.setattr("outbox_pipelines.relay.topics._limit", lambda answer, otherwise: None)


def _numbers(outbox: Outbox, key: str) -> list[int]:
    return numbers_by_key(outbox.messages())[key]


def numbers_by_key(messages: list[Message]) -> dict[str, list[int]]:
    """What arrived of each aggregate, in order; empty for one of which nothing did."""
    found: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        found[message.key].append(json.loads(message.value or "")["n"])
    return found


def test_only_the_guilty_aggregate_waits(outbox: Outbox) -> None:
    """Guards against a rejected event that stops the relay, is skipped, or is overtaken (G3)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    before = [("a", {"n": 0}), ("b", {"n": 0})]
    after = [("a", {"n": 2}), ("b", {"n": 1}), ("c", {"n": 0})]
    ids = _write(outbox, *before, ("a", {"n": 1, "noise": NOISE}), *after)
    totals = _drain(outbox, retry_seconds=60)
    assert _keys(outbox) == ["a", "b", "b", "c"]
    assert _parked(outbox) == [("a", ids[2], "retrying", 1), ("a", ids[3], "waiting", 0)]
    assert totals.events == 4
    _write(outbox, ("a", {"n": 3}), ("b", {"n": 2}))
    _drain(outbox, retry_seconds=60)
    assert _keys(outbox) == ["a", "b", "b", "c", "b"]
    assert [row[2] for row in _parked(outbox)] == ["retrying", "waiting", "waiting"]


@pytest.mark.usefixtures("unasked")
def test_innocents_of_a_refused_batch_are_neither_counted_nor_lost(outbox: Outbox) -> None:
    """Guards against blaming all events of a batch for one (G3, G4)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    events: list[tuple[str, Any]] = [(str(n % 7), {"n": n}) for n in range(300)]
    events.insert(150, ("guilty", {"n": -1, "noise": NOISE}))
    ids = _write(outbox, *events)
    _drain(outbox, retry_seconds=60)
    assert _parked(outbox) == [("guilty", ids[150], "retrying", 1)]
    assert len(outbox.messages()) == 300
    numbers = numbers_by_key(outbox.messages())
    for key in range(7):
        assert numbers[str(key)] == [n for n in range(300) if n % 7 == key]


@pytest.mark.usefixtures("unasked")
def test_several_guilty_events_among_many(outbox: Outbox) -> None:
    """Guards against an isolation that loses, doubles or reorders what was on its way beside it."""
    create_topic(outbox, partitions=4, **{"max.message.bytes": "2000"})
    guilty = {100, 1500, 1501, 2800}
    events = [(str(n % 50), {"n": n, "noise": NOISE} if n in guilty else {"n": n}) for n in range(3_000)]
    _write(outbox, *events)
    with _running(_quick(outbox, max_attempts=2)):
        wait_until(lambda: [row[2] for row in _parked(outbox)] == ["failed"] * 4, what="4 dead letters")
        wait_until(lambda: len(outbox.messages()) == 3_000 - 4, what="all others")
    numbers = numbers_by_key(outbox.messages())
    for key in range(50):
        expected = [n for n in range(3_000) if n % 50 == key and n not in guilty]
        assert numbers[str(key)] == expected


def test_a_dead_letter_lets_its_aggregate_go_on(outbox: Outbox) -> None:
    """Guards against an aggregate that waits for ever, and an attempt more or less than asked for."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    ids = _write(outbox, ("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 5)])
    with _running(_quick(outbox, max_attempts=3)):
        wait_until(lambda: _numbers(outbox, "a") == [1, 2, 3, 4], what="the aggregate to go on")
        assert _parked(outbox) == [("a", ids[0], "failed", 3)]
        _write(outbox, ("a", {"n": 5}))
        wait_until(lambda: _numbers(outbox, "a") == [1, 2, 3, 4, 5], what="the aggregate to be free")
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT status, retry_count, processed_at IS NULL FROM outbox_events ORDER BY seq"
        ).fetchall()
    assert rows == [("FAILED", 3, True)] + [("PROCESSED", 0, False)] * 5


def test_a_dead_letter_may_block_its_aggregate(outbox: Outbox) -> None:
    """Guards against an aggregate that goes on past a dead letter although the operator said block."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = _quick(outbox, max_attempts=1, on_dead_letter="block")
    _write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}), ("b", {"n": 0}))
    with _running(settings):
        wait_until(lambda: [row[2] for row in _parked(outbox)] == ["failed", "waiting"])
        _write(outbox, ("a", {"n": 2}), ("b", {"n": 1}))
        wait_until(lambda: _numbers(outbox, "b") == [0, 1])
        assert _numbers(outbox, "a") == []
    with _running(settings):
        _write(outbox, ("a", {"n": 3}), ("b", {"n": 2}))
        wait_until(lambda: _numbers(outbox, "b") == [0, 1, 2])
        assert _numbers(outbox, "a") == []
    assert [row[2] for row in _parked(outbox)] == ["failed", "waiting", "waiting", "waiting"]


def test_a_mended_topic_lets_the_event_through(outbox: Outbox) -> None:
    """Guards against a retry that never comes, or lets later events of the aggregate go first (G2)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    _write(outbox, ("a", {"n": 0}), ("a", {"n": 1, "noise": NOISE}), ("a", {"n": 2}), ("b", {"n": 0}))
    with _running(_quick(outbox, max_attempts=1000)):
        wait_until(lambda: len(_parked(outbox)) == 2 and _parked(outbox)[0][3] > 1)
        _change(outbox, **{"max.message.bytes": "2000000"})
        wait_until(lambda: _numbers(outbox, "a") == [0, 1, 2], what="the event and those behind it")
        _write(outbox, ("a", {"n": 3}))
        wait_until(lambda: _numbers(outbox, "a") == [0, 1, 2, 3])
    assert _parked(outbox) == []
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT status, retry_count > 0, processed_at >= created_at FROM outbox_events "
            "WHERE aggregate_id = 'a' ORDER BY seq"
        ).fetchall()
    assert rows == [("PROCESSED", n == 1, True) for n in range(4)]


def test_a_type_that_makes_no_topic_name_is_parked(outbox: Outbox) -> None:
    """Guards against one deployment with a bad name that stops everybody's events."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "or/der", 1, "order.placed", {"n": 0})
        emit(connection, "order", 2, "order.placed", {"n": 1})
    _drain(outbox, max_attempts=1)
    assert _keys(outbox) == ["2"]
    with outbox.connect() as connection:
        row = connection.execute("SELECT state, attempts, last_error FROM outbox_parked").fetchone()
    assert row is not None
    assert row[:2] == ("failed", 1)
    assert "not a topic name" in row[2]


def test_attempts_wait_longer_and_longer(outbox: Outbox) -> None:
    """Guards against a busy loop around a poisoned event."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    _write(outbox, ("a", {"n": 0, "noise": NOISE}))
    pauses = []
    for attempts in range(1, 8):
        _drain(outbox, retry_seconds=10, max_attempts=100)
        with outbox.connect() as connection:
            row = connection.execute(
                "SELECT attempts, extract(epoch FROM next_attempt_at - clock_timestamp())::float8 "
                "FROM outbox_parked"
            ).fetchone()
            assert row is not None
            assert row[0] == attempts
            pauses.append(row[1])
            connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp()")
    for pause, expected in zip(pauses, [10, 20, 40, 80, 160, 300, 300], strict=True):
        assert 0.75 * expected < pause < 1.2 * expected


def test_a_blocked_aggregate_stays_blocked_over_a_restart(outbox: Outbox) -> None:
    """Guards against a relay that forgets who waits, and lets later events pass (G2)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    _write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
    _drain(outbox, retry_seconds=60)
    _write(outbox, ("a", {"n": 2}), ("b", {"n": 0}))
    _drain(outbox, retry_seconds=60)
    assert _keys(outbox) == ["b"]
    assert [row[2] for row in _parked(outbox)] == ["retrying", "waiting", "waiting"]


def test_a_dead_letter_is_copied_to_itscreate_topic(outbox: Outbox) -> None:
    """Guards against consumers that never learn what they miss."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    ids = _write(outbox, ("a", {"n": 0, "noise": NOISE[:2000]}))
    _drain(outbox, max_attempts=1, dead_letter_topics=True)
    (copy,) = read_topic(outbox.settings.kafka, f"{outbox.topic()}.dlq")
    assert copy.key == "a"
    assert json.loads(copy.value)["n"] == 0
    assert copy.headers["id"] == ids[0]
    assert copy.headers["dead-letter-topic"] == outbox.topic()
    assert copy.headers["dead-letter-attempts"] == "1"
    assert "MSG_SIZE_TOO_LARGE" in copy.headers["dead-letter-reason"]


def test_the_operators_command_hears_of_a_dead_letter(outbox: Outbox, tmp_path: Any) -> None:
    """Guards against a dead letter that nobody notices."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    ids = _write(outbox, ("a", {"n": 0, "noise": NOISE}))
    heard = tmp_path / "heard"
    _drain(outbox, max_attempts=1, dead_letter_command=f"cat > {heard}.new && mv {heard}.new {heard}")
    wait_until(heard.exists)
    told = json.loads(heard.read_text())
    assert (told["kind"], told["id"], told["attempts"]) == ("dead-letter", ids[0], 1)


def test_a_command_that_fails_harms_nothing(outbox: Outbox) -> None:
    """Guards against an alarm that stops the relay."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    _write(outbox, ("a", {"n": 0, "noise": NOISE}), ("b", {"n": 0}))
    _drain(outbox, max_attempts=1, dead_letter_command="exit 3")
    assert _keys(outbox) == ["b"]
    assert [row[2] for row in _parked(outbox)] == ["failed"]


def test_a_long_queue_behind_a_poisoned_event_comes_in_order(outbox: Outbox) -> None:
    """Guards against runs of released events that overtake each other, or get lost between two runs."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    _write(outbox, ("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 12_001)])
    with _running(_quick(outbox, max_attempts=3)):
        wait_until(lambda: [row[2] for row in _parked(outbox)] == ["failed"], seconds=60)
    assert _numbers(outbox, "a") == list(range(1, 12_001))


def test_a_defect_in_the_prober_ends_the_relay(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against parked events that nobody tries any more, and nobody hears of it."""
    create_topic(outbox, **{"max.message.bytes": "10000"})
    _write(outbox, ("large", NOISE))

    def broken(self: Prober) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Prober, "_flush", broken)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        _drain(outbox)
    monkeypatch.undo()
    _change(outbox, **{"max.message.bytes": "1000000"})
    assert _drain(outbox).events == 1
