"""The verification finds what is wrong: each kind of tampering is one finding, of that kind.

The messages are real ones, relayed once; each test sends them again, tampered with, to topics of its own.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from examples.airline.airline import TABLES
from examples.airline.desks import Desks
from examples.airline.flights import operations
from examples.airline.ledger import DISORDER, MISSING, PHANTOM, TORN, Verdict
from examples.airline.place import topics
from examples.airline.verify import verify
from outbox_pipelines.database import connect, schema
from outbox_pipelines.local import Stack
from outbox_pipelines.relay.service import relay
from outbox_pipelines.settings import Settings, load_settings
from tests.conftest import Message, fresh_database, read_topic, topic_prefix, wait_until
from tests.kafka_clients import Producer

Tampering = Callable[[list[Message]], list[Message]]


@dataclass(frozen=True)
class Published:
    """What an airline wrote, and what a relay made of it."""

    settings: Settings
    messages: list[Message]


@pytest.fixture(scope="module")
def published(stack: Stack) -> Iterator[Published]:
    with fresh_database(stack.dsn) as dsn:
        settings = _with_topics(load_settings(dsn=dsn, kafka=stack.kafka))
        schema.migrate(settings)
        with connect(settings, name="test") as connection:
            connection.execute(TABLES)
        desks = Desks(settings, operations(300), seed=1)
        desks.start()
        wait_until(lambda: not desks.working(), seconds=60, what="the end of the stream")
        relay(settings, until_empty=True)
        messages = [message for topic in topics(settings) for message in read_topic(settings.kafka, topic)]
        assert len(messages) == desks.events
        yield Published(settings, messages)


def test_finds_nothing_wrong_with_what_the_relay_sent(published: Published) -> None:
    verdict = verify(published.settings)
    assert not verdict.findings, verdict.examples
    assert verdict.messages == verdict.operations == len(published.messages)
    assert verdict.duplicates == 0


def test_a_copy_is_as_good(published: Published) -> None:
    assert not _verdict(published, lambda messages: messages).findings


def _lose(messages: list[Message]) -> list[Message]:
    return messages[:40] + messages[41:]


def _lose_an_aircrafts_last(messages: list[Message]) -> list[Message]:
    last = max(index for index, message in enumerate(messages) if message.key == messages[0].key)
    return messages[:last] + messages[last + 1 :]


def _invent(messages: list[Message]) -> list[Message]:
    """What a rolled-back transaction would have sent: the next movement, of a time that never was."""
    return [*messages, _event(messages[0], movement=1 + _movements(messages, messages[0].key), at=_NEVER)]


def _tell_twice(messages: list[Message]) -> list[Message]:
    """The same content under another id is no redelivery."""
    return [*messages, messages[0]._replace(headers=messages[0].headers | {"id": str(uuid.uuid4())})]


def _tell_of_what_was_rolled_back(messages: list[Message]) -> list[Message]:
    """Before the truth: the transaction that was rolled back had the same movement, at another time."""
    return [_event(messages[0], at=_NEVER), *messages]


def _invent_an_aircraft(messages: list[Message]) -> list[Message]:
    return [*messages, _event(messages[0])._replace(key="N00000")]


def _invent_a_flight(messages: list[Message]) -> list[Message]:
    return [*messages, _event(messages[0], flight=999_999)]


def _send_garbage(messages: list[Message]) -> list[Message]:
    return [*messages, messages[0]._replace(value="no event")]


def _swap(messages: list[Message]) -> list[Message]:
    """Two neighbours of one aircraft."""
    first, second = [index for index, message in enumerate(messages) if message.key == messages[0].key][:2]
    swapped = list(messages)
    swapped[first], swapped[second] = messages[second], messages[first]
    return swapped


_NEVER = "2013-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("tampering", "kind"),
    [
        (_lose, MISSING),
        (_lose_an_aircrafts_last, MISSING),
        (_invent, PHANTOM),
        (_tell_of_what_was_rolled_back, PHANTOM),
        (_tell_twice, PHANTOM),
        (_invent_an_aircraft, PHANTOM),
        (_invent_a_flight, PHANTOM),
        (_send_garbage, PHANTOM),
        (_swap, DISORDER),
    ],
)
def test_finds_tampering(published: Published, tampering: Tampering, kind: str) -> None:
    verdict = _verdict(published, tampering)
    assert dict(verdict.findings) == {kind: 1}, verdict.examples
    assert len(verdict.examples) == 1
    assert verdict.examples[0].startswith(f"{kind}: ")


def test_a_phantom_in_place_of_the_truth_is_both(published: Published) -> None:
    verdict = _verdict(published, lambda messages: [_event(messages[0], at=_NEVER), *messages[1:]])
    assert verdict.findings == {PHANTOM: 1, MISSING: 1}, verdict.examples


def test_counts_redeliveries_and_does_not_mind_them(published: Published) -> None:
    # The last ones again, in order: what a relay sends that crashed before it had settled them.
    verdict = _verdict(published, lambda messages: messages + messages[-20:])
    assert verdict.duplicates == 20
    assert not verdict.findings, verdict.examples


def test_finds_half_a_transaction(published: Published) -> None:
    with connect(published.settings, name="test") as connection:
        one = "WHERE tail_number = (SELECT min(tail_number) FROM aircraft)"
        connection.execute(f"UPDATE aircraft SET movements = movements + 1 {one}".encode())
        try:
            assert verify(published.settings).findings == {TORN: 1}
        finally:
            connection.execute(f"UPDATE aircraft SET movements = movements - 1 {one}".encode())


def _verdict(published: Published, tampering: Tampering) -> Verdict:
    settings = _with_topics(published.settings)
    # Idempotent: else what a topic just made refuses at first comes after what it takes then.
    producer = Producer({"bootstrap.servers": settings.kafka, "linger.ms": 0, "enable.idempotence": True})
    for message in tampering(published.messages):
        kind = message.headers["aggregate-type"]
        producer.produce(
            settings.topic.format(aggregate_type=kind),
            message.value,
            message.key,
            # Each message keeps its partition, and with it its place.
            partition=message.partition,
            headers=list(message.headers.items()),
        )
    assert producer.flush(30) == 0
    return verify(settings)


def _with_topics(settings: Settings) -> Settings:
    return settings.model_copy(update={"topic": f"{topic_prefix()}-{{aggregate_type}}"})


def _event(message: Message, **changes: object) -> Message:
    """Another event, with the body changed."""
    return message._replace(
        value=json.dumps(json.loads(message.value or "") | changes),
        headers=message.headers | {"id": str(uuid.uuid4())},
    )


def _movements(messages: list[Message], key: str) -> int:
    return sum(message.key == key for message in messages)
