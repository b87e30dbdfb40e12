"""What is told of each event by itself: a line in the log, a span of its trace. Nothing, unless asked for.

Invariants:
- Decided once per worker: where nobody asked there is no observer, and an event costs one comparison.
- An observer sees an event when it is handed to Kafka's client, and what Kafka says of it; it may change the
  headers, and nothing else of the message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from confluent_kafka import KafkaError, Message

from outbox_pipelines.event import Event
from outbox_pipelines.relay.kafka.encoding import Headers
from outbox_pipelines.relay.telemetry import tracing
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
Report = Callable[[KafkaError | None, Message], None]
# An event, its topic, its headers, and who wants to know what becomes of it: the last two, as they are to be.
Observe = Callable[[Event, str, Headers, Report], tuple[Report, Headers]]


def observer(settings: Settings) -> Observe | None:
    """Who is to be told of each event; None for nobody.

    Raises:
        SetupError: what the settings ask for is not installed.
    """
    observers: list[Observe] = []
    if settings.tracing:
        observers.append(tracing.observer(settings))
    if _LOG.isEnabledFor(logging.DEBUG):
        observers.append(_log)
    if len(observers) < 2:
        return observers[0] if observers else None

    def all_of_them(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
        for observe in observers:
            report, headers = observe(event, topic, headers, report)
        return report, headers

    return all_of_them


def _log(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
    """A line for each event that Kafka has, or refuses."""

    def told(error: KafkaError | None, message: Message) -> None:
        report(error, message)
        fields = {
            "id": event.id,
            "seq": event.seq,
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
