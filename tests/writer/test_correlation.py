"""What an event takes from its surroundings: `correlated`, and OpenTelemetry's current span."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from outbox_pipelines.writer import NewEvent, OutboxError, correlated, emit, emit_many
from tests.schema.events import one
from tests.schema.servers import Connection, Database
from tests.writer import targets

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SPAN = SpanContext(
    0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState([("v", "1")])
)
TRACED = "00-00000000000000000000000000000abc-0000000000000def-01"


def ids(connection: Connection) -> tuple[object, ...]:
    """Correlation and causation of an event that says nothing itself."""
    emitted = emit(connection, "order", 1, "e", {})
    return one(connection, "SELECT correlation_id, causation_id FROM outbox WHERE id = %s", emitted.id)


def test_it_reaches_every_event_within(connection: Connection) -> None:
    """Guards against events of one request that cannot be found together; ids that outlive their request."""
    with correlated(correlation_id="request", causation_id=uuid.UUID(int=1)):
        assert ids(connection) == ("request", str(uuid.UUID(int=1)))
        emit_many(connection, [NewEvent("many", 1, "e", {})])
    assert ids(connection) == (None, None)
    found = one(connection, "SELECT correlation_id FROM outbox WHERE aggregate_type = 'many'")
    assert found == ("request",)


def test_what_an_event_says_wins(connection: Connection) -> None:
    """Guards against an id that was given and is lost."""
    with correlated(correlation_id="request", causation_id="cause"):
        emit(connection, "order", 1, "e", {}, correlation_id="own")
        [_] = emit_many(connection, [NewEvent("order", 1, "e", {}, causation_id="")])
    assert connection.execute("SELECT correlation_id, causation_id FROM outbox ORDER BY seq").fetchall() == [
        ("own", "cause"),
        ("request", ""),
    ]


def test_nesting_restores(connection: Connection) -> None:
    """Guards against a nested handler whose ids leak into the rest of the request, even after an error."""
    with correlated(correlation_id="request", causation_id="a"):
        with contextlib.suppress(ZeroDivisionError), correlated(causation_id="b"):
            assert ids(connection) == ("request", "b")
            raise ZeroDivisionError
        assert ids(connection) == ("request", "a")
        with correlated(correlation_id="other"):
            assert ids(connection) == ("other", "a")
        assert ids(connection) == ("request", "a")
    assert ids(connection) == (None, None)


def test_tasks_inherit_and_keep_apart(shared: Database) -> None:
    """Guards against two requests in one event loop that exchange their ids."""
    with targets.psycopg_connection(shared) as through:
        connection = through.target

        async def request(name: str, mine: asyncio.Event, others: asyncio.Event) -> list[object]:
            with correlated(correlation_id=name):
                mine.set()
                await others.wait()
                return [ids(connection)[0], (await asyncio.to_thread(ids, connection))[0]]

        async def both() -> list[list[object]]:
            one, two = asyncio.Event(), asyncio.Event()
            return list(await asyncio.gather(request("one", one, two), request("two", two, one)))

        assert asyncio.run(both()) == [["one", "one"], ["two", "two"]]
        connection.rollback()


def test_a_thread_of_a_pool_has_none(connection: Connection) -> None:
    """Guards against the ids of the previous user of the thread, which would be worse than none."""
    with ThreadPoolExecutor(1) as pool, correlated(correlation_id="request"):
        assert pool.submit(ids, connection).result() == (None, None)


def test_an_id_that_is_no_text(connection: Connection) -> None:
    """Guards against a refusal that names something the caller never gave."""
    wrong: object = b"x"
    with correlated(correlation_id=wrong), pytest.raises(OutboxError, match="correlation_id"):  # type: ignore[arg-type]
        emit(connection, "order", 1, "e", {})


def traced(connection: Connection) -> tuple[object, ...]:
    return one(connection, "SELECT traceparent, headers FROM outbox ORDER BY seq DESC LIMIT 1")


def test_the_current_span_is_taken(connection: Connection) -> None:
    """Guards against a trace that ends at the outbox."""
    with use_span(NonRecordingSpan(SPAN)):
        emit(connection, "order", 1, "e", {}, headers={"tenant": "t"})
        assert traced(connection) == (TRACED, {"tracestate": "v=1", "tenant": "t"})
        emit_many(connection, [NewEvent("order", 1, "e", {})])
        assert traced(connection) == (TRACED, {"tracestate": "v=1"})


def test_a_trace_that_is_given_wins(connection: Connection) -> None:
    """Guards against the state of one trace next to the id of another."""
    with use_span(NonRecordingSpan(SPAN)):
        emit(connection, "order", 1, "e", {}, traceparent=GIVEN)
        assert traced(connection) == (GIVEN, None)
        emit(connection, "order", 1, "e", {}, headers={"tracestate": "own=1"})
        assert traced(connection) == (TRACED, {"tracestate": "own=1"})


@pytest.mark.parametrize(
    "span", [trace.INVALID_SPAN, NonRecordingSpan(SpanContext(0xABC, 0, is_remote=False))]
)
def test_a_span_that_is_none(connection: Connection, span: trace.Span) -> None:
    """Guards against ids of zeros, which consumers refuse, where OpenTelemetry is loaded and not set up."""
    with use_span(span):
        emit(connection, "order", 1, "e", {})
    assert traced(connection) == (None, None)


def test_a_span_without_a_state(connection: Connection) -> None:
    """Guards against a header without content."""
    with use_span(NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False))):
        emit(connection, "order", 1, "e", {})
    assert traced(connection) == (TRACED[:-2] + "00", None)


def test_opentelemetry_is_not_imported() -> None:
    """Guards against an import that costs applications which have it installed and do not use it."""
    program = (
        "import sys; from outbox_pipelines.writer.context import surroundings; "
        "assert surroundings() == (None, None, None, None); "
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
