"""What event types and aggregate types have of their own: topic, shape, headers, tombstones, retries."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outbox_pipelines.config.rules import Router, Rule, of_types
from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka.message import Encoder, needs_json, needs_time
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, read_topic, wait_until
from tests.relay.parked import keys, parked_rows
from tests.relay.threads import quick, running
from tests.relay.topic import NOISE, create, create_topic

METADATA = json.dumps({"traceparent": "t", "version": "2"})


def _event(aggregate_type: str, event_type: str, payload: str = '{"a": 1}') -> Event:
    return Event(1, "id-1", aggregate_type, "7", event_type, payload, METADATA)


def test_an_event_type_wins_over_its_aggregate_type_and_that_over_all() -> None:
    """Guards against a rule that is ignored, or that replaces more than it names."""
    settings = load_settings(
        topic="all",
        header_names="id=event-id,version=v",
        retry_seconds=7.0,
        aggregate_types={
            "order": {"topic": "orders", "value_format": "flat", "header_names": {"version": ""}}
        },
        event_types={"paid": {"topic": "payments", "max_attempts": 1}, "gone": {"tombstones": True}},
    )
    router, encode = Router(settings), Encoder(settings).encode
    topics = [router.topic(*types) for types in (("order", "paid"), ("order", "x"), ("card", "x"))]
    assert topics == ["payments", "orders", "all"]
    paid = of_types(settings, "order", "paid")
    assert (paid.max_attempts, paid.retry_seconds, paid.value_format) == (1, 7.0, "flat")
    assert of_types(settings, "card", "x") == settings
    value, headers = encode(_event("card", "paid"))
    assert value == '{"a": 1}'
    assert dict(headers) == {
        **{"event-id": "id-1", "event-type": "paid", "aggregate-type": "card", "traceparent": "t", "v": "2"},
    }
    value, headers = encode(_event("order", "paid"))
    assert json.loads(value or "") == {"event_type": "paid", "a": 1}
    # A rule of headers changes what it names: the id is called as everywhere.
    assert dict(headers) == {
        **{"event-id": "id-1", "event-type": "paid", "aggregate-type": "order", "traceparent": "t"},
    }
    assert encode(_event("card", "gone", "null"))[0] is None
    assert encode(_event("card", "x", "null"))[0] == "null"


@pytest.mark.parametrize(
    ("rules", "needs"),
    [
        ({}, (False, False)),
        ({"a": {"value_format": "flat"}}, (False, True)),
        ({"a": {"value_format": "envelope"}}, (True, True)),
        ({"a": {"topic": "b"}}, (False, False)),
        ({"a": {"format": "json_schema"}}, (False, True)),
    ],
)
@pytest.mark.parametrize("place", ["event_types", "aggregate_types"])
def test_what_one_type_needs_is_read_for_all(place: str, rules: Any, needs: tuple[bool, bool]) -> None:
    """Guards against a source that does not read the time that one type has in its value."""
    settings = load_settings(registry_url="http://x", catalog_file="x", **{place: rules})
    assert (needs_time(settings), needs_json(settings)) == needs


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"a": 1}, r"\[a\]: write a topic, or a table of settings"),
        ({"a": {"topik": "b"}}, r"\[a\] topik: Extra inputs are not permitted"),
        ({"a": {"max_attempts": 0}}, r"\[a\] max_attempts: Input should be greater than or equal to 1"),
        ({"a": {"retry_seconds": 0}}, r"\[a\] retry_seconds: Input should be greater than 0"),
        ({"a": {"value_format": "avro"}}, r"\[a\] value_format: Input should be 'payload', 'flat', "),
        (
            {"a": {"header_names": {"id": "x"}}},
            r"\[a\]: header_names renames id: readers need it before",
        ),
        ({"a": {"header_names": {"event-type": ""}}}, r"\[a\]: header_names renames event-type: "),
        ({"a": {"header_names": {"version": "t"}}}, r"\[a\] header_names: two headers would have the name t"),
        (
            {"a": {"format": "xml"}},
            r"\[a\] format: Input should be 'json', 'json_schema', 'avro' or 'protobuf'",
        ),
        ({"a": {"format": "json_schema"}}, r"\[a\]: format json_schema needs OUTBOX_REGISTRY_URL: set it"),
        (
            {"a": {"format": "json_schema", "value_format": "flat"}},
            r"\[a\]: format json_schema needs value_format payload, and it is flat",
        ),
        ({"a": {"flat_members": {"x": "y"}}}, r"\[a\] flat_members: unknown member 'x'"),
        ({"a": {"cloudevents_source": "https://u:pw@h/"}}, r"\[a\] cloudevents_source: has a password in it"),
    ],
)
@pytest.mark.parametrize("place", ["event_types", "aggregate_types"])
def test_a_rule_that_cannot_work_is_refused_where_it_enters(place: str, rules: Any, says: str) -> None:
    """Guards against a mistake that shows at the first event of its type."""
    with pytest.raises(SetupError, match=rf"^OUTBOX_{place.upper()}.* {says}") as refused:
        load_settings(header_names="aggregate-type=t", **{place: rules})
    assert "u:pw" not in str(refused.value)


def test_two_rules_that_meet_at_an_event_fit_each_other() -> None:
    """Guards against two headers of one name, which only the first event of both types would show."""
    rules: dict[str, Any] = {
        "event_types": {"paid": {"header_names": {"traceparent": "x"}}},
        "aggregate_types": {"order": {"header_names": {"version": "x"}}},
    }
    with pytest.raises(SetupError, match=r"\[order\] header_names: two headers would have the name x"):
        load_settings(**rules)
    rules = {
        "event_types": {"paid": {"format": "json_schema"}},
        "aggregate_types": {"order": {"value_format": "flat"}},
    }
    with pytest.raises(SetupError, match=r"\[order\]: format json_schema needs value_format payload"):
        load_settings(registry_url="http://x", catalog_file="x", **rules)


def test_types_have_their_own_retries(outbox: Outbox) -> None:
    """Guards against one retry policy for all: attempts, and what a dead letter blocks."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(
        outbox,
        max_attempts=3,
        event_types={"order.cheap": Rule(max_attempts=1), "order.strict": Rule(on_dead_letter="block")},
        aggregate_types={"ledger": Rule(topic=outbox.topic(), max_attempts=2, on_dead_letter="block")},
    )
    refused = [("order", "a", "order.cheap"), ("order", "b", "order.strict"), ("ledger", "c", "x")]
    with outbox.connect(autocommit=False) as connection:
        for aggregate_type, key, event_type in refused:
            emit(connection, aggregate_type, key, event_type, {"noise": NOISE})
            emit(connection, aggregate_type, key, "after", {})
    expected = [("failed", 1), ("failed", 3), ("waiting", 0), ("failed", 2), ("waiting", 0)]
    with running(settings):
        wait_until(lambda: [row[2:] for row in parked_rows(outbox)] == expected, what="three dead letters")
        wait_until(lambda: keys(outbox) == ["a"])
    # Who takes over finds the same aggregates blocked.
    with running(settings):
        with outbox.connect(autocommit=False) as connection:
            for aggregate_type, key in (("order", "a"), ("order", "b"), ("ledger", "c"), ("order", "d")):
                emit(connection, aggregate_type, key, "later", {})
        wait_until(lambda: sorted(keys(outbox)) == ["a", "a", "d"])
        wait_until(lambda: [row[2] for row in parked_rows(outbox)].count("waiting") == 4)


def test_types_have_their_own_topics_and_shapes(outbox: Outbox) -> None:
    """Guards against a relay that sends a type where, and as, the others are."""
    other = f"{outbox.topic()}-paid"
    create_topic(outbox)
    create(outbox.settings.kafka, other, 1)
    rules = {"order.paid": Rule(topic=other, value_format="cloudevents"), "order.gone": Rule(tombstones=True)}
    with running(quick(outbox, event_types=rules)):
        with outbox.connect(autocommit=False) as connection:
            for event_type, payload in (
                ("order.paid", {"n": 1}),
                ("order.gone", None),
                ("order.placed", None),
            ):
                emit(connection, "order", "a", event_type, payload)
        wait_until(lambda: len(outbox.messages()) == 2)
        wait_until(lambda: len(read_topic(outbox.settings.kafka, other)) == 1)
    (paid,) = read_topic(outbox.settings.kafka, other)
    assert json.loads(paid.value or "")["type"] == "order.paid"
    assert [message.value for message in outbox.messages()] == [None, "null"]
