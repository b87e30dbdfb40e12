"""Events whose payload is bytes: by the content type of each message, beside events in JSON."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.handler_registry import giver
from outbox_pipelines.consumer.testing import handle, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.registry import SchemaRegistry
from outbox_pipelines.writer import BytesPayload
from tests.conftest import wait_until
from tests.consumer.place import Place, running
from tests.registry import FakeRegistry

CONTENT = b"\0\0\0\0\7" + bytes(range(256))
PAYLOAD = BytesPayload(CONTENT, "application/x-protobuf")


@dataclass
class Placed:
    n: int


def _read(content_type: str | None, value: bytes, **more: str) -> Event:
    headers = {"event-type": "e", "aggregate-type": "order", "content-type": content_type, **more, "id": "1"}
    pairs: list[tuple[str, str | bytes | None]] = [
        (name, None if text is None else text.encode()) for name, text in headers.items()
    ]
    return Reader({}).read(Message(topic="orders", partition=0, offset=0, value=value, headers=pairs))


def test_the_content_type_decides() -> None:
    """Guards against bytes that are taken for JSON or a frame, and JSON that is taken for bytes."""
    event = _read("application/x-protobuf", CONTENT)
    assert (event.payload, event.content_type, event._framed) == (CONTENT, "application/x-protobuf", None)
    assert event._content(by_key=False) == _read("application/x-protobuf", CONTENT)._content(by_key=False)
    for content_type in (
        None,
        "",
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/a+json",
    ):
        assert _read(content_type, b'{"n": 1}').payload == {"n": 1}
    # An id in a header is said on purpose.
    framed = _read("application/octet-stream", b"x", __value_schema_id="\0\0\0\0\7")
    assert framed._framed == (b"\0\0\0\0\7", b"x")
    # What the headers lack is not searched for in bytes.
    assert _read("application/x-protobuf", b"\xff", **{"event-type": ""}).type == ""


@pytest.mark.parametrize(
    ("kind", "bytes_are", "json_is"),
    [
        (bytes, CONTENT, None),
        (bytes | None, CONTENT, None),
        (Placed | bytes, CONTENT, Placed(1)),
        (Event[bytes], CONTENT, None),
        (Placed, None, Placed(1)),
        (dict[str, Any], None, {"n": 1}),
        (Any, CONTENT, {"n": 1}),
    ],
)
def test_an_annotation_accepts_bytes_where_it_names_them(kind: Any, bytes_are: Any, json_is: Any) -> None:
    """Guards against a handler that gets what it does not expect, and a refusal that does not say why."""

    def handler(event: Any, connection: object) -> None: ...

    handler.__annotations__["event"] = kind
    give = giver(handler, None)
    for payload, expected, why in (
        (PAYLOAD, bytes_are, "the payload is bytes, not JSON"),
        ({"n": 1}, json_is, "the payload is not "),
    ):
        if expected is None:
            with pytest.raises(UnreadableError, match=why):
                give(make_event("e", payload))
        else:
            given = give(make_event("e", payload))
            assert (given.payload if isinstance(given, Event) else given) == expected


def test_bytes_within_json_are_no_type() -> None:
    """Guards against an annotation that no event can ever match."""

    @dataclass
    class Odd:
        raw: bytes

    def handler(event: Odd, connection: object) -> None: ...

    handler.__annotations__["event"] = Odd
    with pytest.raises(SetupError, match="a payload cannot be read as bytes"):
        giver(handler, None)


def test_a_registry_is_not_asked_about_them(registry: FakeRegistry) -> None:
    """Guards against bytes that begin with 0 and become dead letters, or what some id happens to name."""
    seen: list[Any] = []
    kafka = {"bootstrap.servers": "broker:9092"}
    more: dict[str, Any] = {"registry": SchemaRegistry(registry.url), "dsn": "host=none.invalid"}
    consumer = Consumer(source="billing", topics=["t"], kafka=kafka, **more)
    consumer.on("e")(lambda event, connection: seen.append((event.payload, event.headers["content-type"])))
    assert handle(consumer, make_event("e", PAYLOAD), using=None) == ["handled"]
    assert seen == [(CONTENT, "application/x-protobuf")]
    assert registry.asked == []


@pytest.mark.slow
def test_a_type_changes_to_bytes_and_back_beside_a_consumer(place: Place) -> None:
    """Guards against a hand-over that needs a stop, and an inbox that loses what the bytes are."""
    consumer = place.bare(max_attempts=3, retry_seconds=0.05)
    attempts: list[object] = []

    @consumer.on("order.placed")
    def placed(payload: Placed | bytes, connection: psycopg.Connection[Any]) -> None:
        n = payload.n if isinstance(payload, Placed) else int.from_bytes(payload, "big")
        attempts.append(payload)
        if n == 2 and attempts.count(payload) == 1:
            raise ValueError("through the inbox")
        connection.execute("INSERT INTO effects (n) VALUES (%s)", [n])

    for value in (b'{"n": 0}', b"\0\0\0\0\1", b"\2", b'{"n": 3}'):
        of_bytes = {} if value.startswith(b"{") else {"content_type": "application/x-protobuf"}
        headers = {"id": str(uuid.uuid4()), "event_type": "order.placed", "aggregate_type": "order"}
        place.put(value, key="1", **headers, **of_bytes)
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 4, what="effects")
        counts = run.end()
    assert counts.dead_letters == 0
    assert [n for (n,) in place.rows("SELECT n FROM effects ORDER BY n")] == [0, 1, 2, 3]
