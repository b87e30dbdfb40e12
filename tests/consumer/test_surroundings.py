"""What is around a handler: the producer's trace, ids for what it writes, and what tells events apart."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox_pipelines.consumer import Counts, Event
from outbox_pipelines.consumer.handler_transactions import surroundings
from outbox_pipelines.relay import service
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, wait_until
from tests.consumer.place import Place, effect, running, uuid7

Connection = psycopg.Connection[Any]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def test_the_span_follows_the_producers(place: Place, spans: InMemorySpanExporter) -> None:
    """Guards against a trace that ends at Kafka."""
    [event_id] = place.send(uuid7(), traceparent=PARENT)
    seen: list[int] = []
    consumer = place.bare()
    consumer.on("order.placed")(lambda *_: seen.append(trace.get_current_span().get_span_context().span_id))
    with running(consumer):
        wait_until(lambda: spans.get_finished_spans(), what="a span")
    [span] = spans.get_finished_spans()
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, "b7ad6b7169203331")
    assert span.kind is trace.SpanKind.CONSUMER
    assert span.attributes is not None
    assert span.attributes["messaging.message.id"] == event_id
    assert seen == [span.context.span_id]


def test_the_span_of_many_is_linked_to_all(place: Place, spans: InMemorySpanExporter) -> None:
    events = []
    for n in range(3):
        place.send(uuid7(), traceparent=PARENT.replace("b7ad", f"b7a{n}"))
    consumer = place.bare()
    consumer.on("order.placed")(lambda event, _: events.append(event))
    with running(consumer):
        wait_until(lambda: len(spans.get_finished_spans()) == 3, what="spans")
    spans.clear()
    with surroundings(events, "billing"):
        pass
    [span] = spans.get_finished_spans()
    assert {f"{link.context.span_id:016x}"[:4] for link in span.links} == {"b7a0", "b7a1", "b7a2"}


def test_what_a_handler_writes_was_caused_by_its_event(place: Place, outbox: Outbox) -> None:
    """Guards against a chain of services in which the cause of an event cannot be traced."""
    first = place.send(uuid7(), correlation_id="request-1")[0]

    def handler(event: Event, connection: Connection) -> None:
        emit(
            connection,
            aggregate_type="invoice",
            aggregate_id="1",
            event_type="invoice.made",
            payload={},
        )

    consumer = place.bare(connect=lambda: psycopg.connect(outbox.settings.dsn, autocommit=True))
    with psycopg.connect(outbox.settings.dsn) as connection:
        from outbox_pipelines.consumer import migrate

        migrate(connection)
    consumer.on("order.placed")(handler)
    with running(consumer):
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
    service.relay(outbox.settings, until_empty=True)
    with psycopg.connect(outbox.settings.dsn) as connection:
        rows = connection.execute("SELECT correlation_id, causation_id FROM outbox").fetchall()
    assert rows == [("request-1", first)]


@pytest.mark.extended
def test_events_with_one_key_are_one(place: Place) -> None:
    """Guards against a producer's retry under a new id that is handled again, though it was asked for."""
    for _ in range(2):
        place.send(uuid7(), uuid7(), idempotency_key="order-1-placed")
        place.send(uuid7())
    consumer = place.consumer(dedupe="key")
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=3, duplicates=3)
    consumer = place.bare("shipping")
    consumer.on("order.placed")(effect)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted("shipping") == 0, what="all offsets")
        assert run.end() == Counts(handled=6)
