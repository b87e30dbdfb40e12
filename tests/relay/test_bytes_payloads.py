"""Payloads that are bytes already: unchanged in Kafka, whatever the settings, and parked if they are none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.kafka.message import Encoder, EncodingError, SchemaOf
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import BytesPayload, emit
from outbox_pipelines.writer.content import LIMIT
from tests.conftest import Outbox, wait_until
from tests.relay.parked import parked_rows
from tests.relay.slot import slots
from tests.relay.threads import quick, running

CONTENT = b"\0\0\0\0\1" + bytes(range(256))
PAYLOAD = BytesPayload(CONTENT, "application/x-protobuf; messageType=shop.Order")
METADATA = '{"traceparent": "t", "headers": {"Content-Type": "own", "a": "b"}}'


def _no_schema(aggregate_type: str, event_type: str, version: str | None) -> Any:
    raise EncodingError("it has no schema")


@pytest.mark.parametrize(
    ("given", "schema_of"),
    [
        ({}, None),
        ({"value_format": "flat", "header_names": "aggregate-id=about"}, None),
        ({"value_format": "envelope", "tombstones": True}, None),
        ({"value_format": "cloudevents"}, None),
        ({"format": "avro", "registry_url": "http://x", "catalog_file": "x.yaml"}, _no_schema),
        ({"event_types": {"e": {"value_format": "flat"}}}, None),
    ],
)
def test_shape_and_format_do_not_change_them(given: dict[str, Any], schema_of: SchemaOf | None) -> None:
    """Guards against bytes that become a part of JSON, need a schema, or lose a header."""
    encode = Encoder(load_settings(**given), schema_of).encode
    value, headers = encode(Event(1, "id-1", "order", "7", "e", PAYLOAD.text(), METADATA))
    assert value == CONTENT
    named = [*headers]
    assert named[:3] == [("id", "id-1"), ("event-type", "e"), ("aggregate-type", "order")]
    assert named[-3:] == [("content-type", PAYLOAD.content_type), ("traceparent", "t"), ("a", "b")]
    bytes_member = PAYLOAD.text()[1:-1]
    for wrong in (
        '{"outbox-bytes": {"base64": "secret"}}',
        # As jsonb sorts members: by their length first.
        f'{{"other": 1, {bytes_member}}}',
        f'{{{bytes_member}, "zzzzzzzzzzzzzz": 1}}',
        f'{{"n": {"9" * 5000}, {bytes_member}}}',
        f'{{"outbox-body": {{"key": "2026-11-27/a", "size": 1, "sha256": "{"0" * 64}"}}, {bytes_member}}}',
        f'{{"a": {"[" * 3000}{"]" * 3000}, {bytes_member}}}',
    ):
        with pytest.raises(EncodingError, match=r'^its payload has the member "outbox-bytes" and is not \{'):
            encode(Event(1, "id-1", "order", "7", "e", wrong, None))


@pytest.mark.parametrize(
    "payload", ['{"a": {"outbox-bytes": 1}}', '["outbox-bytes"]', '{"a": "outbox-bytes"}']
)
def test_the_name_elsewhere_is_json(payload: str) -> None:
    """Guards against an event that is parked because its content mentions the reserved member."""
    assert Encoder(load_settings()).encode(Event(1, "id-1", "order", "7", "e", payload, None))[0] == payload


@pytest.mark.parametrize("has_slot", [False, True])
def test_they_are_published_unchanged(outbox: Outbox, has_slot: bool) -> None:
    """Guards against bytes that are lost on a way: read from a slot, delayed, parked or released."""
    if has_slot:
        slots.make(outbox)
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", "usual", "e", PAYLOAD)
        emit(connection, "order", "usual", "e", {"n": 1})
        emit(connection, "order", "delayed", "e", PAYLOAD, deliver_after=timedelta(seconds=-1))
        emit(connection, "order", "parked", "e", {"outbox-bytes": {"base64": "AB-_", "content-type": "a/b"}})
        emit(connection, "order", "parked", "e", PAYLOAD)
        emit(connection, "order", "large", "e", BytesPayload(b"x" * LIMIT, "a/b"))
    with running(quick(outbox, max_attempts=2)):
        wait_until(lambda: len(outbox.messages()) == 5, what="what waits behind the malformed one")
    found = {(each.key, each.value): each.headers.get("content-type") for each in outbox.messages()}
    content = CONTENT.decode(errors="surrogateescape")
    assert found == {
        ("usual", content): PAYLOAD.content_type,
        ("usual", '{"n": 1}'): None,
        ("delayed", content): PAYLOAD.content_type,
        ("parked", content): PAYLOAD.content_type,
        ("large", "x" * LIMIT): "a/b",
    }
    [(key, _, state, attempts)] = parked_rows(outbox)
    assert (key, state, attempts) == ("parked", "failed", 2)
    with outbox.connect() as connection:
        [[why]] = connection.execute("SELECT last_error FROM outbox_parked").fetchall()
    assert why.endswith('the text in "outbox-bytes" is not base64')
