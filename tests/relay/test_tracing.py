"""Traces: the relay's span joins the producer's, the consumer's can join the relay's."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from psycopg.types.json import Jsonb

from outbox_pipelines.relay import service
from outbox_pipelines.relay.telemetry import observers
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit
from tests.conftest import Message, Outbox, patience
from tests.relay.topic import NOISE, create_topic

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is exported in this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observers, "_provider", cache(lambda: provider))
    yield exporter
    provider.shutdown()


def _drain(outbox: Outbox, **more: object) -> None:
    service.relay(_traced(outbox, **more), until_empty=True)


def _traced(outbox: Outbox, **more: object) -> Settings:
    return outbox.settings.model_copy(update={"tracing": True, **more})


def _write(outbox: Outbox, *traceparents: str | None, payload: Any = None, headers: Any = None) -> list[str]:
    """Write an event for aggregate 0, 1 … with each of these unchecked values; return the ids."""
    with outbox.connect(autocommit=False) as connection:
        return [
            str(drawn)
            for n, traceparent in enumerate(traceparents)
            for (drawn,) in connection.execute(
                "SELECT id FROM outbox_emit('order', %s::text, 'order.placed', %s, %s, traceparent => %s)",
                [n, Jsonb(payload), None if headers is None else Jsonb(headers), traceparent],
            )
        ]


def _messages(outbox: Outbox) -> list[Message]:
    return sorted(outbox.messages(), key=lambda message: message.key)


def _passed_on(span: ReadableSpan) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def test_a_span_joins_the_producers_trace_and_is_passed_on(
    outbox: Outbox, spans: InMemorySpanExporter
) -> None:
    """Guards against a trace that ends at the outbox, and a consumer that skips the relay in it."""
    before = time.time_ns()
    (event_id,) = _write(outbox, SAMPLED, headers={"tracestate": "shop=1", "tenant": "eu"})
    _drain(outbox)
    (message,) = outbox.messages()
    (span,) = spans.get_finished_spans()
    assert span.parent is not None
    assert span.parent.is_remote
    assert (f"{span.parent.trace_id:x}", f"{span.parent.span_id:x}") == (TRACE.lstrip("0"), PARENT)
    assert span.context.trace_id == span.parent.trace_id
    assert span.context.trace_state.to_header() == "shop=1"
    assert message.headers["traceparent"] == _passed_on(span) != SAMPLED
    assert message.headers["tracestate"] == "shop=1"
    assert message.headers["tenant"] == "eu"
    assert (span.name, span.kind) == (f"{outbox.topic()} publish", SpanKind.PRODUCER)
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert before < span.start_time < span.end_time < time.time_ns()
    assert span.attributes == {
        "messaging.system": "kafka",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": outbox.topic(),
        "messaging.message.id": event_id,
        "messaging.kafka.message.key": "0",
        "messaging.destination.partition.id": str(message.partition),
        "messaging.kafka.offset": message.offset,
        "outbox.seq": 1,
        "outbox.aggregate_type": "order",
        "outbox.event_type": "order.placed",
    }


def test_in_a_transaction_the_span_is_passed_on_too(outbox: Outbox, spans: InMemorySpanExporter) -> None:
    """Guards against traces that depend on how often events may be delivered."""
    _write(outbox, SAMPLED)
    _drain(outbox, delivery="exactly_once")
    (message,) = outbox.messages()
    # A broker that stood still for as long as a transaction may take has had one aborted.
    *_, span = spans.get_finished_spans()
    assert message.headers["traceparent"] == _passed_on(span)
    assert span.status.status_code is StatusCode.UNSET


def test_only_sampled_traces_have_spans(outbox: Outbox, spans: InMemorySpanExporter) -> None:
    """Guards against spans that were not sampled, and events that fail because of an invalid header."""
    given = [None, UNSAMPLED, "nonsense", SAMPLED, f"00-{'0' * 32}-{PARENT}-01"]
    _write(outbox, *given)
    _drain(outbox)
    (span,) = spans.get_finished_spans()
    found = [message.headers.get("traceparent") for message in _messages(outbox)]
    assert found == [None, UNSAMPLED, "nonsense", _passed_on(span), given[4]]


def test_unasked_the_header_passes_unchanged(outbox: Outbox, spans: InMemorySpanExporter) -> None:
    """Guards against a relay that traces, or touches the trace of others, by default."""
    _write(outbox, SAMPLED)
    _drain(outbox, tracing=False)
    (message,) = outbox.messages()
    assert message.headers["traceparent"] == SAMPLED
    assert spans.get_finished_spans() == ()


def test_a_header_of_another_name_is_passed_on_under_it(outbox: Outbox, spans: InMemorySpanExporter) -> None:
    """Guards against a trace that is lost where headers are mapped."""
    _write(outbox, SAMPLED)
    _drain(outbox, header_names="traceparent=trace")
    (message,) = outbox.messages()
    (span,) = spans.get_finished_spans()
    assert message.headers["trace"] == _passed_on(span)
    assert "traceparent" not in message.headers


def test_without_the_header_nothing_is_traced(outbox: Outbox, spans: InMemorySpanExporter) -> None:
    """Guards against a header that comes back although the operator left it out."""
    _write(outbox, SAMPLED)
    _drain(outbox, header_names="traceparent=")
    (message,) = outbox.messages()
    assert "traceparent" not in message.headers
    assert spans.get_finished_spans() == ()


def test_the_value_keeps_the_trace_in_which_the_event_was_made(
    outbox: Outbox, spans: InMemorySpanExporter
) -> None:
    """Guards against a value that changes from one attempt to the next: refused messages are found by it."""
    _write(outbox, SAMPLED)
    _drain(outbox, value_format="cloudevents")
    (message,) = outbox.messages()
    (span,) = spans.get_finished_spans()
    assert f'"traceparent": "{SAMPLED}"' in (message.value or "")
    assert message.headers["traceparent"] == _passed_on(span)


def test_each_refusal_is_a_span_with_its_reason(
    outbox: Outbox, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against refusals that a trace does not show, and spans that never end."""
    # Without the topic's limit the event is refused by the broker: first in its batch, then alone.
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
    create_topic(outbox, **{"max.message.bytes": "2000"})
    (event_id,) = _write(outbox, SAMPLED, payload={"noise": NOISE})
    _drain(outbox, max_attempts=1)
    finished = spans.get_finished_spans()
    assert len(finished) == 2
    for span in finished:
        assert span.attributes is not None
        assert span.attributes["messaging.message.id"] == event_id
        assert span.attributes["error.type"] == "MSG_SIZE_TOO_LARGE"
        assert span.status.status_code is StatusCode.ERROR
        assert f"{span.context.trace_id:032x}" == TRACE
    assert outbox.messages() == []


class _Collector(BaseHTTPRequestHandler):
    """Takes spans as an OpenTelemetry collector does."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest.FromString(body)
        self.server.got.append((self.path, request))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    got: list[tuple[str, ExportTraceServiceRequest]] = []
    server.got = got  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_command_sends_its_spans_before_it_ends(
    outbox: Outbox, collector: tuple[str, list[tuple[str, ExportTraceServiceRequest]]]
) -> None:
    """Guards against spans that end with the process, and settings of OpenTelemetry that are not heard."""
    url, got = collector
    ids = _write(outbox, SAMPLED, SAMPLED)
    given = {"OUTBOX_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    done = outbox.process("relay", "--until-empty", **given)
    assert done.returncode == 0, done.stderr
    assert [path for path, _ in got] == ["/v1/traces"]
    (resource,) = got[0][1].resource_spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "outbox-relay"
    found = {
        attribute.value.string_value
        for span in resource.scope_spans[0].spans
        for attribute in span.attributes
        if attribute.key == "messaging.message.id"
    }
    assert found == set(ids)
    _write(outbox, SAMPLED)
    named = {"OTEL_SERVICE_NAME": "shop", "OUTBOX_LOG_LEVEL": "debug"}
    done = outbox.process("relay", "--until-empty", **given, **named)
    # In addition to its line in the log.
    assert f" is in {outbox.topic()} [" in done.stderr
    names = {a.key: a.value.string_value for a in got[1][1].resource_spans[0].resource.attributes}
    assert names["service.name"] == "shop"


@pytest.mark.extended
def test_an_unavailable_collector_costs_no_event(outbox: Outbox) -> None:
    """Guards against a relay that hangs, or fails, because its spans cannot be delivered."""
    _write(outbox, SAMPLED)
    given = {"OUTBOX_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    begun = time.monotonic()
    done = outbox.process("relay", "--until-empty", **given)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < patience(30)
    assert len(outbox.messages()) == 1
    assert done.stderr.splitlines()[-1].startswith("published 1 event ")


@pytest.mark.extended
def test_the_last_line_is_the_commands_own(outbox: Outbox) -> None:
    """Guards against a collector's trouble that hides why a command failed."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "or/der", 1, "order.placed", {})
        emit(connection, "order", 2, "order.placed", {}, traceparent=SAMPLED)
    given = {"OUTBOX_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = outbox.process("relay", "--until-empty", **given)
    assert done.returncode == 1
    *lines, last = done.stderr.splitlines()
    assert "export" in "".join(lines)
    assert last.startswith("outbox: 1 event could not be published")


def test_a_missing_extra_is_one_line(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 'No module named', and against a relay that traces nothing in silence."""
    from outbox_pipelines.errors import SetupError

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SetupError, match=r"OUTBOX_TRACING needs .*pip install 'outbox-pipelines\[tracing\]'"):
        _drain(outbox)


def test_a_setting_that_is_neither_is_one_line(outbox: Outbox) -> None:
    """Guards against a relay that takes a typing error for no."""
    done = outbox.process("status", OUTBOX_TRACING="ture")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("outbox: OUTBOX_TRACING=ture: ")
