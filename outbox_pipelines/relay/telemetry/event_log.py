"""A log line for each event that Kafka has, or refuses; with OUTBOX_LOG_LEVEL=debug."""

from __future__ import annotations

import logging

from confluent_kafka import KafkaError, Message

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.kafka.encoding import Headers
from outbox_pipelines.relay.telemetry.observer import Report

_LOG = logging.getLogger(__name__)


def is_on() -> bool:
    """Return whether the lines would be written."""
    return _LOG.isEnabledFor(logging.DEBUG)


def observe(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
    """A line for each event that Kafka has, or refuses."""

    def told(error: KafkaError | None, message: Message) -> None:
        report(error, message)
        fields = {
            "id": event.id,
            "seq": event.own_seq,
            "aggregate_type": event.aggregate_type,
            "aggregate_id": event.aggregate_id,
            "event_type": event.event_type,
            "topic": topic,
        }
        if error is None:
            partition, offset = message.partition(), message.offset()
            _LOG.debug(
                "%s is in %s [%s] at %s",
                event,
                topic,
                partition,
                offset,
                extra=fields | {"partition": partition, "offset": offset},
            )
        else:
            _LOG.debug(
                "%s is not in %s: %s", event, topic, error.str(), extra=fields | {"error": error.name()}
            )

    return told, headers
