"""The publisher alone: what it sends to Kafka, and in which order."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaError

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.shared import SharedBlockedAggregates
from tests.conftest import Outbox, wait_until
from tests.relay.threads import running
from tests.relay.topic import NOISE, change_topic, create_topic


def _publisher(producer: IdempotentProducer) -> Publisher:
    return Publisher(producer, SharedBlockedAggregates(), patience=10.0, clock=time.monotonic)


def _batch(*seqs: int) -> Batch:
    nowhere = Snapshot(0, 0, ())
    events = [Event(n, f"id-{n}", "order", "a", "order.placed", json.dumps({"n": n}), None) for n in seqs]
    return Batch(events, sum(len(event.payload) for event in events), nowhere, nowhere, ends_tick=False)


def test_a_batch_does_not_overtake_the_rest_of_the_one_before(outbox: Outbox) -> None:
    """Guards against a new producer (for a topic with a low limit) that takes the next batch first."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    producer = IdempotentProducer(outbox.settings)
    publisher = _publisher(producer)
    # The client's messages at its start are served first; otherwise they count as in flight.

    def is_quiet() -> bool:
        publisher.poll(0.01)
        return not producer.in_flight

    wait_until(is_quiet)
    publisher.publish(_batch(1, 2))
    publisher.publish(_batch(3, 4))

    def is_empty() -> bool:
        publisher.poll(0.01)
        publisher.acknowledged()
        return publisher.pending == 0

    wait_until(is_empty, what="all to be acknowledged")
    publisher.discard()
    assert [json.loads(message.value or "")["n"] for message in outbox.messages()] == [1, 2, 3, 4]


class Failed(NamedTuple):
    """What the client tells of a message that failed."""

    name: str
    aggregate: str
    content: str

    def topic(self) -> str:
        return self.name

    def key(self) -> bytes:
        return self.aggregate.encode()

    def value(self) -> bytes:
        return self.content.encode()


def test_of_equal_messages_the_last_have_failed(outbox: Outbox) -> None:
    """Guards against sending again what Kafka has: of a partition it has the first, never the last alone."""
    producer = IdempotentProducer(outbox.settings)
    in_flight = [Event(n, f"id-{n}", "order", "a", "order.placed", "{}", None) for n in range(4)]
    error = KafkaError(KafkaError._PURGE_INFLIGHT)
    failed: list[Any] = [(Failed(outbox.topic(), "a", "{}"), error)] * 2
    producer.close()
    assert {event.seq for event, _ in producer.identify(in_flight, failed)} == {2, 3}


@pytest.mark.extended
def test_only_the_guilty_are_suspects_where_the_limit_is_not_to_be_had(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against thousands of innocents that are tried alone for one guilty event in their batch."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    producer = IdempotentProducer(outbox.settings)
    publisher = _publisher(producer)
    for first in (0, 500):
        guilty = first + 250
        publisher.publish(
            _unrelated({n: NOISE[:1000] if n == guilty else NOISE[:20] for n in range(first, first + 500)})
        )
        assert _complete(publisher) == [guilty]
    publisher.discard()


def test_no_event_is_suspected_when_its_topics_limit_is_lowered(outbox: Outbox) -> None:
    """Guards against all events of a refused batch that are tried alone: the known limit was wrong."""
    create_topic(outbox)
    producer = IdempotentProducer(outbox.settings)
    publisher = _publisher(producer)
    publisher.publish(_unrelated({0: NOISE[:20]}))
    assert _complete(publisher) == []
    change_topic(outbox, **{"max.message.bytes": "2000"})
    publisher.publish(_unrelated({n: NOISE[n : n + 20] for n in range(1, 1_000)}))
    assert _complete(publisher) == []
    publisher.discard()
    assert len(outbox.messages()) == 1_000


def test_a_refusal_is_no_outage(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a breaker that opens because refusals take long, and nothing is acknowledged (G4)."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    producer = IdempotentProducer(outbox.settings)
    publisher = _publisher(producer)
    publisher.publish(_unrelated({0: NOISE, 1: NOISE[:20]}))
    (delivery,) = publisher._deliveries

    def is_refused() -> bool:
        producer.serve(0.01, linger=True)
        return bool(delivery.failed)

    wait_until(is_refused, what="the refusal")
    # A machine under load: the refusal comes after the breaker's patience.
    publisher.breaker.quiet(time.monotonic() - 60, "nothing yet")
    publisher.poll(0)
    assert publisher.breaker.state is State.CLOSED
    assert _complete(publisher) == [0]
    publisher.discard()


def test_no_event_overtakes_a_new_producers_first(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against events that are accepted behind a refused one: a broker that does not know a producer
    on a partition accepts any sequence number (G2)."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    large = json.dumps({"n": 1, "noise": NOISE * 20})
    # Its batch is full with it: what follows is another request, in flight at the same time.
    assert len(large) > 2_000_000
    publisher = _publisher(IdempotentProducer(outbox.settings))
    batch = _batch(1, 2, 3)
    batch.events[0] = batch.events[0]._replace(payload=large)
    publisher.publish(batch)
    publisher.publish(_batch(4, 5))
    assert _complete(publisher) == [1]
    publisher.discard()
    assert outbox.messages() == []


def test_each_partition_is_begun_once(outbox: Outbox) -> None:
    """Guards against events that wait for an acknowledgment after their partition has given one."""
    create_topic(outbox)
    publisher = _publisher(IdempotentProducer(outbox.settings))
    publisher.publish(_unrelated({n: [] for n in range(500)}))
    assert _complete(publisher) == []
    publisher.publish(_batch(*range(500, 600)))
    (delivery,) = publisher._deliveries
    # Some may be acknowledged by now.
    assert (len(delivery.in_flight), delivery.unsent) == (100, [])
    assert _complete(publisher) == []
    publisher.discard()
    assert [json.loads(each.value or "")["n"] for each in outbox.messages() if each.key == "a"] == [
        *range(500, 600)
    ]


def test_an_old_producer_is_replaced_between_two_batches(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a producer that brokers have forgotten, and whose next event could be overtaken."""
    create_topic(outbox)
    producer = IdempotentProducer(outbox.settings)
    publisher = _publisher(producer)
    publisher.publish(_batch(1, 2))
    assert _complete(publisher) == []
    first = producer._producer
    monkeypatch.setattr(producer, "_renew_at", 0.0)
    publisher.publish(_batch(3, 4))
    assert _complete(publisher) == []
    assert producer._producer is not first
    assert not producer.is_outdated
    publisher.discard()
    assert [json.loads(message.value or "")["n"] for message in outbox.messages()] == [1, 2, 3, 4]


def test_a_refusal_is_met_while_no_other_event_is_published(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that crashes at an event that is refused at a quiet moment."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    publisher = _publisher(IdempotentProducer(outbox.settings))
    publisher.publish(_unrelated({0: NOISE[:20]}))
    assert _complete(publisher) == []
    publisher.publish(_unrelated({1: NOISE, 2: NOISE[:20], 3: NOISE[:20]}))
    suspects: list[int] = []

    def is_empty() -> bool:
        publisher.poll(0.5, linger=False)
        suspects.extend(seq for complete in publisher.acknowledged() for seq in complete.suspects)
        return publisher.pending == 0

    wait_until(is_empty, what="all to be acknowledged or suspected")
    assert suspects == [1]
    publisher.discard()


def _unrelated(noise: dict[int, list[str]]) -> Batch:
    """An event for each, each of another aggregate."""
    nowhere = Snapshot(0, 0, ())
    events = [
        Event(n, f"id-{n}", "order", str(n), "order.placed", json.dumps({"n": n, "noise": some}), None)
        for n, some in noise.items()
    ]
    return Batch(events, sum(len(event.payload) for event in events), nowhere, nowhere, ends_tick=False)


def _complete(publisher: Publisher) -> list[int]:
    """The suspects of what is being published, when all is done."""
    found: list[int] = []

    def is_empty() -> bool:
        publisher.poll(0.01)
        found.extend(seq for delivery in publisher.acknowledged() for seq in delivery.suspects)
        return publisher.pending == 0

    wait_until(is_empty, what="all to be acknowledged or suspected")
    return found


def test_what_the_clients_report_to_a_standby_does_not_pile_up(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a standby whose memory grows for as long as Kafka is unavailable."""
    nowhere = outbox.settings.model_copy(update={"kafka": "127.0.0.1:1"})
    producer = IdempotentProducer(nowhere)
    wait_until(lambda: producer.in_flight > 1, what="reports of a broker that does not exist")
    producer.idle()
    assert producer.in_flight <= 1
    producer.close()
    served = threading.Event()
    monkeypatch.setattr(IdempotentProducer, "idle", lambda self: served.set())
    place = Shard(outbox.settings, 0, "active")
    assert place.try_take()
    with running(outbox.settings):
        wait_until(served.is_set, what="the standby to serve its clients")
    place.close()
