"""Handlers get the body of a large payload as if it had been in the message."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.consumer import AsyncConsumer, Consumer, Event, handler_breakers
from outbox_pipelines.consumer.testing import handle, handle_async, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer.references import Body
from tests.conftest import wait_until
from tests.consumer.place import Place, running

KAFKA = {"bootstrap.servers": "broker:9092"}
LARGE = {"n": 7, "text": "x" * 1000}


@dataclass
class Placed:
    n: int


def put(bodies: Bodies, content: bytes, content_type: str = "application/json") -> dict[str, Any]:
    """Return the payload of an event with this body."""
    [payload] = bodies.put("2026-03-01", [Body("null", bodies, content, content_type)])
    found: dict[str, Any] = json.loads(payload)
    return found


def a_consumer(seen: list[Any], kind: Any = Event, **more: Any) -> Consumer:
    consumer = Consumer(source="billing", topics=["t"], kafka=KAFKA, dsn="host=none.invalid", **more)

    def placed(given: Any, connection: object) -> None:
        seen.append(given)

    placed.__annotations__["given"] = kind
    consumer.on("order.placed")(placed)
    return consumer


@pytest.fixture
def bodies(tmp_path: Path) -> Bodies:
    return Bodies(str(tmp_path))


def test_a_handler_sees_the_body(bodies: Bodies) -> None:
    """Guards against a shape of the value, or an annotation, with which a handler gets the reference."""
    payload = put(bodies, json.dumps(LARGE).encode())
    flat = {**payload, "eventType": "order.placed"}
    event_id = str(uuid.uuid4())
    envelope = {
        "event_id": event_id,
        "event_type": "order.placed",
        **{"aggregate_type": "order", "aggregate_id": "1", "payload": payload, "timestamp": "now"},
    }
    cloudevent = {
        "specversion": "1.0",
        "type": "order.placed",
        "source": "/",
        "id": event_id,
        "data": payload,
    }
    for value, expected in (
        (payload, LARGE),
        (flat, {**LARGE, "eventType": "order.placed"}),
        (envelope, LARGE),
        (cloudevent, LARGE),
    ):
        seen: list[Any] = []
        event = make_event("order.placed", id=event_id, value=json.dumps(value).encode())
        assert handle(a_consumer(seen, bodies=bodies), event, using=None) == ["handled"]
        assert seen[0].payload == expected
        assert seen[0].reference.size == len(json.dumps(LARGE))
    assert handle(a_consumer(seen, Placed, bodies=bodies), event, using=None) == ["handled"]
    assert seen[1] == Placed(7)
    pdf = make_event("order.placed", put(bodies, b"%PDF", "application/pdf"))
    handle(a_consumer(seen, bodies=bodies), pdf, using=None)
    assert seen[2].payload == b"%PDF"


def test_an_event_loop(bodies: Bodies) -> None:
    """Guards against an asynchronous handler that gets the reference."""
    consumer = AsyncConsumer(
        source="billing", topics=["t"], kafka=KAFKA, dsn="host=none.invalid", bodies=bodies
    )
    seen: list[Any] = []

    @consumer.on("order.placed", batch=10)
    async def placed(events: list[Event], connection: object) -> None:
        seen.extend(event.payload for event in events)

    events = [make_event("order.placed", each) for each in (put(bodies, b'{"n": 1}'), {"n": 2})]
    assert asyncio.run(handle_async(consumer, *events, using=None)) == ["handled", "handled"]
    assert seen == [{"n": 1}, {"n": 2}]


def test_without_the_store_the_reference_is_the_payload(bodies: Bodies) -> None:
    """Guards against a consumer that fails because its producer stores large payloads now."""
    payload = put(bodies, b'{"n": 1}')
    seen: list[Any] = []
    event = make_event("order.placed", payload)
    assert handle(a_consumer(seen), event, using=None) == ["handled"]
    assert seen[0].payload == payload
    assert seen[0].reference.key == payload["outbox-body"]["key"]
    assert make_event("order.placed", {"n": 1}).reference is None
    with pytest.raises(Exception, match=r"n is missing; its body is in a store: pass bodies=Bodies\(…\)"):
        handle(a_consumer(seen, Placed), event, using=None)


@pytest.mark.parametrize(
    ("body", "change", "verdict", "why"),
    [
        (b'{"n": 1}', {"sha256": "0" * 64}, "retry", "has another sha256: restore the object"),
        (b'{"n": 1}', {"key": "2026-03-01/gone"}, "retry", "is missing in .*: restore the object"),
        (b'{"n": 1}', {"key": "../secret"}, "dead_letter", "is not a reference: it needs"),
        (b'{"n": ', {}, "dead_letter", "its body .* is not JSON"),
        (b'{"m": 1}', {}, "dead_letter", "n is missing"),
    ],
)
def test_a_body_that_cannot_be_used(
    bodies: Bodies, body: bytes, change: dict[str, Any], verdict: str, why: str
) -> None:
    """Guards against a handler that gets wrong content, and a failure that does not say what to do."""
    payload = put(bodies, body)
    payload["outbox-body"] |= change
    seen: list[Any] = []
    event = make_event("order.placed", payload)
    consumer = a_consumer(seen, Placed, bodies=bodies)
    assert handle(consumer, event, using=None, raises=False) == [verdict]
    with pytest.raises(Exception, match=why):
        handle(consumer, event, using=None)
    assert seen == []


def test_what_is_no_store() -> None:
    """Guards against a consumer that fails at its first large payload."""
    with pytest.raises(SetupError, match="bodies is 's3://bucket': write for example Bodies"):
        a_consumer([], bodies="s3://bucket")


@pytest.mark.extended
@pytest.mark.slow
def test_an_unavailable_store_is_an_outage(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against dead letters after an outage of the store, and against duplicates that need their
    body, which may have been removed since."""
    monkeypatch.setattr(handler_breakers, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(handler_breakers, "_LONGEST_PAUSE", 0.1)
    mounted, away = tmp_path / "mounted", tmp_path / "away"
    mounted.mkdir()
    bodies = Bodies(str(mounted))
    payloads = [json.dumps(put(bodies, b'{"n": %d}' % n)) for n in range(3)]
    ids = [str(uuid.uuid4()) for _ in payloads]
    mounted.rename(away)
    consumer = place.bare(max_attempts=2, retry_seconds=0.05, bodies=bodies)

    @consumer.on("order.placed")
    def placed(event: Event, connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO effects (n) VALUES (%s)", [event.payload["n"]])

    def send() -> None:
        for n, (event_id, payload) in enumerate(zip(ids, payloads, strict=True)):
            place.put(payload, key=str(n), id=event_id, event_type="order.placed", aggregate_type="order")

    send()
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"waiting": 3}, seconds=60, what="events that wait")
        seen = consumer.counts.failures
        wait_until(lambda: consumer.counts.failures >= seen + 3, seconds=60, what="further attempts")
        assert place.value("SELECT max(attempts) FROM inbox") == 0
        assert "is unavailable (read)" in place.value("SELECT max(last_error) FROM inbox")
        away.rename(mounted)
        wait_until(lambda: place.effects() == 3, seconds=60, what="effects")
        mounted.rename(away)
        send()
        wait_until(lambda: consumer.counts.duplicates == 3, seconds=60, what="duplicates")
        counts = run.end()
    assert counts.dead_letters == 0
