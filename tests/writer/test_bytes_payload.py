"""Payloads that are bytes already: how a row has them, through every driver, and what is refused."""

from __future__ import annotations

import base64
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.catalog.document import Catalog, compiled
from outbox_pipelines.writer import (
    BytesPayload,
    InvalidEventError,
    NewEvent,
    OutboxError,
    PayloadTooLargeError,
    derive_key,
    validate_with,
)
from outbox_pipelines.writer.bytes_payload import read_bytes
from outbox_pipelines.writer.content import LIMIT
from outbox_pipelines.writer.json_text import to_json
from outbox_pipelines.writer.sqlalchemy import OutboxEvent
from outbox_pipelines.writer.testing import assert_emitted, captured
from tests.schema.servers import Connection, Database
from tests.writer import targets
from tests.writer.targets import TARGETS, Target, Through

PROTOBUF = "application/x-protobuf"
PAYLOAD = BytesPayload(bytes(range(256)), PROTOBUF)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_every_target_writes_them(kept: Database, target: Target) -> None:
    """Guards against a driver that changes the bytes, and events of a test that are not those written."""
    order = uuid.uuid4().hex
    with target(kept) as through:
        through.emit("order", order, "e", PAYLOAD, headers={"h": 1})
        through.emit_many([NewEvent("order", order, "e", PAYLOAD), NewEvent("order", order, "e", {"n": 1})])
        written = [each for each in through.events_of() if each.aggregate_id == order]
    assert [each.payload for each in written] == [PAYLOAD, PAYLOAD, {"n": 1}]
    rows = kept.rows("SELECT payload::text FROM outbox WHERE aggregate_id = %s ORDER BY seq", order)
    assert [read_bytes(text) for (text,) in rows[:2]] == [PAYLOAD, PAYLOAD]


def test_objects_of_a_session_and_delayed_events(kept: Database) -> None:
    """Guards against a way to write that knows JSON alone."""
    order = uuid.uuid4().hex
    with targets.session(kept) as through:
        through.target.add(OutboxEvent("order", order, "e", PAYLOAD, deliver_after=timedelta(hours=1)))
    [(text,)] = kept.rows("SELECT payload::text FROM outbox_delayed WHERE aggregate_id = %s", order)
    assert read_bytes(text) == PAYLOAD


def test_the_limit_counts_bytes(connection: Connection) -> None:
    """Guards against a third of the size that is lost to base64, and a refusal that aborts a transaction."""
    through = Through(connection)
    through.emit("order", 1, "e", BytesPayload(b"\xff" * LIMIT, PROTOBUF))
    with pytest.raises(PayloadTooLargeError, match="has 1,000,001 bytes, more than 1,000,000: store it"):
        through.emit("order", 1, "e", BytesPayload(b"x" * (LIMIT + 1), PROTOBUF))
    # As `encode` of PostgreSQL writes it, in lines.
    write = (
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'e', "
        "jsonb_build_object('outbox-bytes', jsonb_build_object("
        "'base64', encode(%b, 'base64'), 'content-type', 'application/x-protobuf'))) RETURNING payload::text"
    )
    [text] = connection.execute(write, [b"\xfe" * LIMIT]).fetchone() or []
    assert read_bytes(text) == BytesPayload(b"\xfe" * LIMIT, PROTOBUF)
    for size in (LIMIT + 1, 2 * LIMIT):
        with (
            pytest.raises(psycopg.errors.ProgramLimitExceeded, match=f"has {size} bytes"),
            connection.transaction(),
        ):
            connection.execute(write, [b"x" * size])
    for refused in (
        '{"outbox-bytes": {"base64": "' + "?" * 1_200_000 + '"}}',
        '{"outbox-bytes": {"base64": "' + " " * 1_500_000 + '"}}',
        '{"outbox-bytes": {"base64": 1}, "x": "' + "x" * 1_500_000 + '"}',
        '"' + "x" * LIMIT + '"',
    ):
        with pytest.raises(psycopg.errors.ProgramLimitExceeded), connection.transaction():
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES ('order', '1', 'e', %s::text::jsonb)",
                [refused],
            )


@pytest.mark.parametrize(
    ("content", "content_type", "why"),
    [
        ("text", PROTOBUF, "is a str: give bytes"),
        (b"", "", "is not valid: give one such as application/x-protobuf"),
        (b"", "protobuf", "is not valid"),
        (b"", "a/b\r\nx: y", "is not valid"),
        (b"", None, "is not valid"),
        (b"", "a/" + "b" * 200, "has 202 characters"),
        (b"{}", "application/JSON; charset=utf-8", "is that of JSON: pass the parsed JSON"),
        (b"{}", "application/cloudevents+json", "is that of JSON"),
    ],
)
def test_what_is_refused(content: Any, content_type: Any, why: str) -> None:
    """Guards against an event that only the relay refuses, or a message that no consumer can read."""
    with captured(), pytest.raises(OutboxError, match=why):
        Through(None).emit("order", 1, "e", BytesPayload(content, content_type))


def test_bytes_alone_say_what_to_pass() -> None:
    """Guards against a writer who does not find the class."""
    with captured(), pytest.raises(OutboxError, match="a payload can be a BytesPayload"):
        Through(None).emit("order", 1, "e", b"x")


def test_tests_of_applications_compare_them() -> None:
    """Guards against assertions that know JSON alone, and a key that bytes cannot have."""
    with captured() as events:
        Through(None).emit("order", 1, "e", PAYLOAD)
    assert_emitted(events, "e", payload=PAYLOAD)
    with pytest.raises(AssertionError, match="payload is BytesPayload"):
        assert_emitted(events, "e", payload=BytesPayload(b"other", PROTOBUF))
    other = BytesPayload(b"", PROTOBUF)
    assert derive_key(1, "e", PAYLOAD) == derive_key(1, "e", PAYLOAD) != derive_key(1, "e", other)


def test_the_event_catalog_refuses_bytes_for_json() -> None:
    """Guards against bytes of a type whose consumers expect its schema, and of one that is not known."""
    entry = {"description": "x", "producer": "x", "owner": "x"}
    events = {"e": entry, "of json": {**entry, "schema": {"type": "object"}}}
    validate_with(compiled(Catalog.model_validate({"events": events}), refuses_unknown=True))
    try:
        with captured() as seen:
            Through(None).emit("order", 1, "e", PAYLOAD)
            for event_type, why in (
                ("of json", "its schema one of JSON"),
                ("other", "not in the event catalog"),
            ):
                with pytest.raises(InvalidEventError, match=why):
                    Through(None).emit("order", 1, event_type, PAYLOAD)
    finally:
        validate_with(None)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"outbox-bytes": 1}',
        '{"outbox-bytes": {"base64": "AAAA"}}',
        '{"outbox-bytes": {"base64": 1, "content-type": "a/b"}}',
        '{"outbox-bytes": {"base64": "AAAA", "content-type": 1}}',
        '{"outbox-bytes": {"base64": "AAAA", "content-type": "application/json"}}',
        '{"outbox-bytes": {"base64": "AAA", "content-type": "a/b"}}',
        '{"outbox-bytes": {"base64": "AAé=", "content-type": "a/b"}}',
        '{"outbox-bytes": {"base64": "AA-_", "content-type": "a/b"}}',
        '{"outbox-bytes": {"base64": "AAAA", "content-type": "a/b", "more": 1}}',
        '{"outbox-bytes": {"base64": "AAAA", "content-type": "a/b"}, "total": 1}',
        '{"outbox-bytes": ' + "[" * 100_000,
    ],
)
def test_another_shape_is_an_error(text: str) -> None:
    """Guards against content that is dropped without a word, and content in a message."""
    with pytest.raises(ValueError, match="outbox-bytes") as refused:
        read_bytes(text)
    assert "AA" not in str(refused.value)


def test_line_breaks_are_none_of_the_content() -> None:
    """Guards against base64 of other languages that is refused: many write it in lines."""
    lines = base64.encodebytes(PAYLOAD.content).decode().replace("\n", "\\r\\n")
    text = f'{{"outbox-bytes": {{"base64": "{lines}", "content-type": "{PROTOBUF}"}}}}'
    assert read_bytes(text) == PAYLOAD


def test_a_part_of_a_payload_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Guards against advice to make another part of the payload what must be the whole of it."""
    for part, name in ((PAYLOAD, "BytesPayload"), (Bodies(str(tmp_path)).large({}), "LargePayload")):
        with pytest.raises(
            OutboxError, match=rf"^payload\.inner is a {name}, which must be the whole payload: "
        ):
            to_json("payload", {"inner": part})
    with pytest.raises(
        OutboxError, match=r"^payload\.raw does not serialize to JSON: bytes have no JSON form"
    ):
        to_json("payload", {"raw": b""})
