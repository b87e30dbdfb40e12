"""What surrounds a handler: a span that follows the producer's, and ids for the events that it writes.

Invariants:
- OpenTelemetry is used where the application has loaded it, and never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from outbox_pipelines import __version__
from outbox_pipelines.consumer.event_reading import Event
from outbox_pipelines.writer import correlated


def surroundings(events: Sequence[Event], source: str) -> AbstractContextManager[None]:
    """One event's handler writes events that it caused, in its trace; that of many writes on its own."""
    span = _span(events, source)
    if len(events) > 1:
        return span or nullcontext()
    ids = correlated(correlation_id=events[0].correlation_id, causation_id=events[0].id)
    return ids if span is None else _within(span, ids)


@contextmanager
def _within(span: AbstractContextManager[Any], ids: AbstractContextManager[None]) -> Iterator[None]:
    with span, ids:
        yield


def _span(events: Sequence[Event], source: str) -> Any:
    """Return the handler's span; None if nothing would see it."""
    otel = sys.modules.get("opentelemetry.trace")
    if otel is None:
        return None
    # Libraries load OpenTelemetry too. Without a provider, a span only passes a trace on.
    is_unset = isinstance(otel.get_tracer_provider(), getattr(otel, "ProxyTracerProvider", ()))
    if is_unset and not any(each.traceparent for each in events):
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extract = TraceContextTextMapPropagator().extract
    carried = [
        extract({"traceparent": each.traceparent, "tracestate": each.headers.get("tracestate") or ""})
        for each in events
        if each.traceparent
    ]
    first = events[0]
    attributes: dict[str, Any] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": first.topic,
        "messaging.consumer.group.name": source,
    }
    if len(events) == 1:
        attributes |= {"messaging.message.id": first.id, "outbox.event_type": first.type}
        follows: dict[str, Any] = {"context": carried[0]} if carried else {}
    else:
        attributes["messaging.batch.message_count"] = len(events)
        links = (otel.get_current_span(each).get_span_context() for each in carried)
        follows = {"links": [otel.Link(each) for each in links]}
    return otel.get_tracer("outbox_pipelines.consumer", __version__).start_as_current_span(
        f"{first.topic} process", kind=otel.SpanKind.CONSUMER, attributes=attributes, **follows
    )
