"""Verdicts of the prober, with a client in the place of Kafka's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.parked import Attempt, Tried, Verdict
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.settings import load_settings


class _Client:
    """Accepts every message, and commits none."""

    def begin_transaction(self) -> None: ...

    def produce(self, *given: Any, on_delivery: Any, **named: Any) -> None:
        on_delivery(None, None)

    def commit_transaction(self, seconds: float) -> None:
        raise KafkaException(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH, "fenced", False, False, True))

    def __len__(self) -> int:
        return 0


def test_a_copy_that_is_not_committed_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a dead letter whose copy no consumer of the dead letter topic sees."""
    settings = load_settings(kafka="127.0.0.1:1", dead_letter_topics=True)
    topics = SimpleNamespace(find_for_trial=lambda name, seconds: SimpleNamespace(name=name))
    prober = Prober(settings, cast(TopicLookups, topics), "transactional")
    monkeypatch.setattr(prober, "_new_producer", _Client)
    event = Event(1, "0198", "order", "42", "order.placed", "{}", None)
    refused = Tried(Attempt(event, 4, is_last=True, is_replay=False), Verdict.REFUSED, "too large")
    assert prober._copied(refused).verdict is Verdict.UNKNOWN
