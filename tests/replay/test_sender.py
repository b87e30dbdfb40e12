"""A replay's sender: whatever is drawn, it ends, and all is sent in the order of its key."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import Stack
from outbox_pipelines.replay import replays, sender
from outbox_pipelines.replay.sender import Sender, StoppedError
from outbox_pipelines.settings import load_settings
from tests.conftest import Message, patience, read_topic, topic_prefix
from tests.history import mock, verify
from tests.relay.topic import NOISE, create

ROUNDS: Final = 30
SECONDS: Final = 5.0
PARTITIONS: Final = (1, 2, 5)
# What one event may have, and a batch of the others.
LIMIT: Final = 60_000
REFUSED: Final = json.dumps(NOISE)


@dataclass(frozen=True)
class Drawn:
    """The events of a replay, and how they are sent."""

    replay: uuid.UUID
    topics: dict[str, int]
    """The topic of each type of event, in order, with its number of partitions."""
    events: list[Event]
    """In the order of `seq`; of type `order.N` for the N-th topic."""
    bursts: list[int]
    """How many events are read at once."""
    rate: float
    refused: Event | None


def draw(chance: random.Random, among: dict[str, int]) -> Drawn:
    """Few or many events, keys and topics; in some of them one event that Kafka refuses."""
    keys, topics = chance.choice((1, 3, 1000)), chance.sample([*among], chance.randint(1, len(among)))
    count = chance.choice((1, 5, 50, 500))
    large = chance.randrange(count) if chance.random() < 0.4 else -1
    events = [
        Event(
            *(n + 1, str(uuid.UUID(int=chance.getrandbits(128))), "order", str(chance.randrange(keys))),
            *(f"order.{chance.randrange(len(topics))}", REFUSED if n == large else "{}", None),
        )
        for n in range(count)
    ]
    bursts = [chance.choice((1, 7, 200)) for _ in range(count)]
    rate = chance.choice((1e9, 1e9, 5_000.0))
    return Drawn(
        replay=uuid.UUID(int=chance.getrandbits(128)),
        topics={topic: among[topic] for topic in topics},
        events=events,
        bursts=bursts,
        rate=rate,
        refused=events[large] if large >= 0 else None,
    )


def reader(drawn: Drawn) -> Any:
    """What `replays` reads the events with."""

    def events(after: int, last: int) -> Iterator[list[Event]]:
        rest = [event for event in drawn.events if after < event.seq <= last]
        bursts = iter(drawn.bursts)
        while rest:
            most = next(bursts)
            yield rest[:most]
            rest = rest[most:]

    return SimpleNamespace(events=events)


@contextmanager
def sending(kafka: str, drawn: Drawn) -> Iterator[tuple[Sender, Any]]:
    """A sender of these events, and what says that it took too long."""
    deadline = time.monotonic() + patience(20)
    is_late = lambda: time.monotonic() > deadline  # noqa: E731
    made = Sender(
        load_settings(kafka=kafka),
        drawn.replay,
        {("order", f"order.{n}"): topic for n, topic in enumerate(drawn.topics)},
        drawn.topics,
        rate=drawn.rate,
        is_stopped=is_late,
        position=0,
        sent=0,
    )
    try:
        yield made, is_late
    finally:
        made.close()


def refusal_of(kafka: str, drawn: Drawn) -> tuple[str, int, int]:
    """Replay these events; return why that has ended, and up to which `seq` how many were acknowledged."""
    replay: Any = SimpleNamespace(last_seq=drawn.events[-1].seq)
    with sending(kafka, drawn) as (made, is_late):
        try:
            assert replays._send(reader(drawn), made, replay, is_late), "it stands still"
        except SetupError as error:
            return str(error), made.position, made.sent
        return "", made.position, made.sent


def check(drawn: Drawn, ended: tuple[str, int, int], found: list[Message]) -> None:
    """All is there once, in the order of its key; of a refused event's partition nothing behind it."""
    why, position, sent = ended
    at = {event.id: event for event in drawn.events}
    seqs = [at[str(each.headers["id"])].seq for each in found]
    if drawn.refused is None:
        assert (why, position, sent) == ("", len(at), len(at))
        assert sorted(seqs) == list(range(1, len(at) + 1))
    else:
        before = drawn.refused.seq - 1
        assert f"event {drawn.refused.id} (seq {before + 1}, " in why
        assert (position, sent) == (before, before)
        assert len(seqs) == len(set(seqs))
        assert set(range(1, before + 1)) <= {*seqs} <= {*at_most(drawn)}
    order: dict[tuple[str, str], list[int]] = {}
    for each, seq in zip(found, seqs, strict=True):
        order.setdefault((each.topic, each.key), []).append(seq)
    assert all(some == sorted(some) for some in order.values())


def at_most(drawn: Drawn) -> Iterator[int]:
    """The events that may be sent: none behind the refused one of its key."""
    refused = drawn.refused
    assert refused is not None
    for event in drawn.events:
        is_its = (event.event_type, event.aggregate_id) == (refused.event_type, refused.aggregate_id)
        if event.seq < refused.seq or not is_its:
            yield event.seq


def test_whatever_is_sent_it_ends_and_keeps_the_order(stack: Stack) -> None:
    """Guards against a replay that stands still, leaves something out, or sends it in another order."""
    chance = random.Random(verify.seed())
    prefix = topic_prefix()
    topics = {f"{prefix}-{partitions}": partitions for partitions in PARTITIONS}
    for topic, partitions in topics.items():
        create(stack.kafka, topic, partitions, **{"max.message.bytes": str(LIMIT)})
    until = time.monotonic() + SECONDS
    ends: list[tuple[Drawn, tuple[str, int, int]]] = []
    while len(ends) < ROUNDS and time.monotonic() < until:
        ends.append((drawn := draw(chance, topics), refusal_of(stack.kafka, drawn)))
    found = [each for topic in topics for each in read_topic(stack.kafka, topic)]
    for drawn, ended in ends:
        check(drawn, ended, [each for each in found if each.headers["replay-id"] == str(drawn.replay)])


def test_a_client_that_fails_without_a_reason_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a replay that waits for ever, also if it is stopped, or that ends without a word, if
    Kafka's client fails and no message is the cause."""
    monkeypatch.setattr(sender, "_EXPLAIN_SECONDS", 0.5)
    drawn = draw(random.Random(0), {"orders": 3})
    events = [Event(n, str(uuid.uuid4()), "order", str(n % 5), "order.0", "{}", None) for n in range(1, 201)]
    with mock.running() as cluster:
        cluster.create({"order": "orders"}, 3)
        with sending(cluster.bootstrap, drawn) as (made, _):
            failure: list[BaseException | None] = [None]

            def send() -> None:
                try:
                    made.send(events[:100])
                    assert made.finish()
                    cluster.answer(*[KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER] * 10)
                    made.send(events[100:])
                    made.finish()
                except (KafkaException, SetupError, StoppedError, AssertionError) as error:
                    failure[0] = error

            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            thread.join(patience(30))
            assert not thread.is_alive()
        assert isinstance(failure[0], KafkaException), failure
        assert made.position == 100
