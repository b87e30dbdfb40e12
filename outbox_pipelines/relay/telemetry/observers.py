"""Observers of each published event: a log line (level debug), an OpenTelemetry span, both, or none.

Invariants:
- Decided once per worker: without an observer, an event costs one comparison.
- An observer sees an event when it is passed to Kafka's client, and Kafka's answer; of the message it may
  change only the headers.
- Only an event with a sampled trace gets a span, which lasts until Kafka's answer. The message's header
  passes it on; the value, and any other event, pass unchanged.
- Nothing of OpenTelemetry is imported unless OUTBOX_TRACING asks for it.
- If the collector is unavailable, spans are lost, never events, and the relay's end is not delayed for long.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, Message

from outbox_pipelines import __version__
from outbox_pipelines.config import parsed
from outbox_pipelines.config.rules import of_types
from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka import client_errors
from outbox_pipelines.relay.kafka.message import Headers
from outbox_pipelines.settings import MessageSettings, ProcessSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_LOG = logging.getLogger(__name__)
# For the last spans, when the relay ends.
_FLUSH_SECONDS: Final = 5.0
_SERVICE: Final = "outbox-relay"

Report = Callable[[KafkaError | None, Message], None]
# Takes an event, its topic, its headers and the callback for Kafka's answer; returns the callback and headers
# to use.
Observe = Callable[[Event, str, Headers, Report], tuple[Report, Headers]]


def observer(settings: ProcessSettings) -> Observe | None:
    """Return the observer of each event; None without one.

    Raises:
        SetupError: what the settings ask for is not installed.
    """
    observers: list[Observe] = []
    if settings.tracing:
        observers.append(_spans(settings))
    if _LOG.isEnabledFor(logging.DEBUG):
        observers.append(_line)
    if len(observers) < 2:
        return observers[0] if observers else None

    def all_of_them(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
        for observe in observers:
            report, headers = observe(event, topic, headers, report)
        return report, headers

    return all_of_them


def _line(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
    """Log whether Kafka has the event."""

    def on_report(error: KafkaError | None, message: Message) -> None:
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

    return on_report, headers


def _spans(settings: MessageSettings) -> Observe:
    """Return what makes a span of each event with a sampled trace.

    Raises:
        SetupError: the extra `tracing` is not installed.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        tracer = _provider().get_tracer("outbox_pipelines.relay", __version__)
    except ImportError as error:
        raise SetupError(
            f"OUTBOX_TRACING needs {error.name}: pip install 'outbox-pipelines[tracing]', or unset it"
        ) from None
    extract = TraceContextTextMapPropagator().extract

    @lru_cache(10_000)
    def ours(aggregate_type: str, event_type: str) -> dict[str, str]:
        name = parsed.header_names(of_types(settings, aggregate_type, event_type)).get("traceparent")
        return {"tracestate": "tracestate"} | ({name: "traceparent"} if name else {})

    def observe(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
        names = ours(event.aggregate_type, event.event_type)
        carried = {names[header]: str(value) for header, value in headers if header in names}
        if "traceparent" not in carried:
            return report, headers
        parent = extract(carried)
        if not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return report, headers
        span = tracer.start_span(
            f"{topic} publish",
            context=parent,
            kind=trace.SpanKind.PRODUCER,
            attributes={
                "messaging.system": "kafka",
                "messaging.operation.type": "send",
                "messaging.operation.name": "publish",
                "messaging.destination.name": topic,
                "messaging.message.id": event.id,
                "messaging.kafka.message.key": event.aggregate_id,
                **({} if event.own_seq is None else {"outbox.seq": event.seq}),
                "outbox.aggregate_type": event.aggregate_type,
                "outbox.event_type": event.event_type,
            },
        )
        context = span.get_span_context()
        passed_on = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

        def on_report(error: KafkaError | None, message: Message) -> None:
            report(error, message)
            if error is None:
                span.set_attribute("messaging.destination.partition.id", str(message.partition()))
                span.set_attribute("messaging.kafka.offset", message.offset() or 0)
            else:
                span.set_attribute("error.type", error.name())
                span.set_status(trace.StatusCode.ERROR, client_errors.describe(error))
            span.end()

        return on_report, [
            (header, passed_on if names.get(header) == "traceparent" else value) for header, value in headers
        ]

    return observe


def close() -> None:
    """Send the last spans, as far as the collector takes them."""
    if not _provider.cache_info().currsize:
        return
    provider = _provider()
    _provider.cache_clear()
    # In a thread, because with an unavailable collector the shutdown can ignore its timeout.
    last = threading.Thread(target=provider.shutdown, name="outbox-tracing", daemon=True)
    last.start()
    last.join(_FLUSH_SECONDS)


@cache
def _provider() -> TracerProvider:
    """One for the process; exporters and limits are as the standard OTEL_… variables say."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {"service.name": _SERVICE})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    atexit.register(close)
    return provider
