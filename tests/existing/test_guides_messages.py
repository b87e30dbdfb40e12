"""A message is what the publisher of a guide sends: topic, key, value and headers, by settings alone."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings
from tests.conftest import Message, read_topic
from tests.existing import guides
from tests.existing.conftest import Make
from tests.existing.guides import Guide
from tests.existing.textbook import Table

KEY = str(uuid.UUID(int=7))
BODY: dict[str, Any] = {"type": "theirs", "total": 12.50}
# Which topic the guide's publisher chooses, and other names of members and headers.
MERGED = {
    "topic": "{aggregate_type:lower}-events",
    "value_format": "flat",
    "flat_members": "event_type=type",
}
SETTINGS: dict[str, dict[str, str]] = {
    "A": MERGED,
    "B": MERGED,
    "C": {"topic": "default-events", "header_names": "id=event-id,aggregate-id=aggregate-id,aggregate-type="},
    "D": {"topic": "domain-events.{aggregate_type:lower}", "value_format": "envelope"},
    "E": {"topic": "outbox.event.{aggregate_type}", "header_names": "event-type=event_type"},
}
# The map of event types that guide C has, beside its default.
TOPICS = "order.created=orders,inventory.reservation.requested=inventory"


def _relayed(guide: Guide, make_table: Make, path: Path, event_type: str, topic: str) -> tuple[str, Message]:
    """Relay one event; its id and its message, which is alone in the topic."""
    table = make_table(guide.ddl, guide.mapping)
    prefix = table.settings.topic.partition("{")[0]
    settings = {**SETTINGS[guide.name], "topic": prefix + SETTINGS[guide.name]["topic"]}
    if guide.name == "C":
        settings["event_types"] = TOPICS.replace("=", f"={prefix}")
    environment = {f"OUTBOX_{name.upper()}": value for name, value in settings.items()}
    with table.connect() as connection:
        event_id = guide.writers[0](connection, KEY, event_type, BODY)
    done = table.outbox.outbox("relay", "--until-empty", **(table.environment | environment))
    assert done.returncode == 0, done.stderr
    [message] = read_topic(table.settings.kafka, prefix + topic)
    assert message.key == KEY
    return event_id, message


@pytest.mark.parametrize("guide", [guides.A, guides.B], ids=lambda guide: guide.name)
def test_a_body_with_type_and_key_merged_in(guide: Guide, make_table: Make, tmp_path: Path) -> None:
    event_id, message = _relayed(guide, make_table, tmp_path, "order.created", "order-events")
    key = {"idempotency_key": f"key-{event_id}"} if guide is guides.A else {}
    assert json.loads(message.value or "") == {"type": "order.created", **key, "total": 12.50}


@pytest.mark.parametrize(
    ("event_type", "topic"),
    [("order.created", "orders"), ("inventory.reservation.requested", "inventory"), ("x", "default-events")],
)
def test_topics_by_event_type(make_table: Make, tmp_path: Path, event_type: str, topic: str) -> None:
    event_id, message = _relayed(guides.C, make_table, tmp_path, event_type, topic)
    assert json.loads(message.value or "") == BODY
    assert message.headers == {
        "event-id": event_id,
        "event-type": event_type,
        "aggregate-id": KEY,
    }


def test_an_envelope(make_table: Make, tmp_path: Path) -> None:
    event_id, message = _relayed(guides.D, make_table, tmp_path, "order.created", "domain-events.order")
    value = json.loads(message.value or "")
    # As the isoformat() of the guide's publisher, which omits a fraction of zero.
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", value.pop("timestamp"))
    assert value == {
        "event_id": event_id,
        "event_type": "order.created",
        "aggregate_type": "Order",
        "aggregate_id": KEY,
        "payload": BODY,
    }


def test_a_trace_is_passed_on(make_table: Make, tmp_path: Path) -> None:
    event_id, message = _relayed(guides.E, make_table, tmp_path, "order.created", "outbox.event.Order")
    assert json.loads(message.value or "") == BODY
    trace_id = message.headers["trace_id"]
    assert trace_id is not None
    assert message.headers == {
        "id": event_id,
        "event_type": "order.created",
        "aggregate-type": "Order",
        "trace_id": trace_id,
        "traceparent": message.headers["traceparent"],
    }
    assert re.fullmatch(rf"00-{trace_id}-[0-9a-f]{{16}}-01", message.headers["traceparent"] or "")


TRACES = """
CREATE TABLE outbox (
    seq bigint PRIMARY KEY, id text NOT NULL, aggregate_type text NOT NULL, aggregate_id text NOT NULL,
    event_type text NOT NULL, payload jsonb, "Trace" {type}, parent text, headers jsonb,
    published_at timestamptz)
"""
TRACES_MAPPING = """
name = "outbox"
[columns]
published_at = "published_at"
trace_id = "Trace"
headers = "headers"
"""
HEX = "0af7651916cd43dd8448eb211c80319c"


def _traced(
    table: Table, trace_id: str | None, parent: str | None, headers: str | None
) -> dict[str, str | None]:
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO outbox VALUES (1, '1', 'order', '1', 'order.created', '{}', %s, %s, %s)",
            [trace_id, parent, headers],
        )
    assert table.drain().events == 1
    [message] = table.messages()
    usual = ("id", "event-type", "aggregate-type")
    return {name: value for name, value in message.headers.items() if name not in usual}


@pytest.mark.parametrize(
    ("trace_id", "carried"),
    [
        (HEX, HEX),
        (HEX.upper(), HEX),
        ("0" * 32, None),
        (HEX[:-1], None),
        (HEX + "0", None),
        ("x" * 32, None),
        ("", None),
        (f"00-{HEX}-b7ad6b7169203331-01", None),
    ],
)
def test_only_the_id_of_a_trace_makes_a_traceparent(
    make_table: Make, trace_id: str, carried: str | None
) -> None:
    """Guards against a traceparent that consumers' libraries refuse."""
    headers = _traced(make_table(TRACES.format(type="varchar(64)"), TRACES_MAPPING), trace_id, None, None)
    assert headers.pop("Trace") == trace_id
    assert list(headers) == (["traceparent"] if carried else [])
    if carried:
        assert (headers["traceparent"] or "")[:36] == f"00-{carried}-"


def test_a_trace_as_a_uuid(make_table: Make) -> None:
    table = make_table(TRACES.format(type="uuid"), TRACES_MAPPING)
    headers = _traced(table, HEX, None, '{"own": "1"}')
    assert headers["own"] == "1"
    assert headers["Trace"] == str(uuid.UUID(HEX))
    assert (headers["traceparent"] or "")[:36] == f"00-{HEX}-"


def test_a_row_without_a_trace(make_table: Make) -> None:
    assert _traced(make_table(TRACES.format(type="uuid"), TRACES_MAPPING), None, None, None) == {}


def test_the_rows_own_traceparent_wins(make_table: Make) -> None:
    mapping = TRACES_MAPPING + 'traceparent = "parent"\n'
    table = make_table(TRACES.format(type="text"), mapping)
    parent = f"00-{HEX}-b7ad6b7169203331-00"
    assert _traced(table, "f" * 32, parent, None) == {"Trace": "f" * 32, "traceparent": parent}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("event_type", "part 1 is not name=value"),
        ("topic=x", "unknown member 'topic': use event_id, event_type"),
        ("event_type=a,event_type=b", "part 2 has a name that another has"),
        ("event_type=idempotency_key", "two members would have the name idempotency_key"),
    ],
)
def test_names_of_members_that_cannot_be(given: str, problem: str) -> None:
    with pytest.raises(SetupError, match=f"OUTBOX_FLAT_MEMBERS.*{problem}"):
        load_settings(flat_members=given)
