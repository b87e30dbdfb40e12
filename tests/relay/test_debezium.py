"""The same rows through Debezium's outbox event router and through the relay: the same messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from benchmarks import debezium
from outbox_pipelines.database import schema
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings
from tests.conftest import Message, fresh_database, read_topic, topic_prefix, wait_until
from tests.relay.topic import create

ROUTER = "transforms.outbox."
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PLAIN = ('{"total": 5, "note": "größer <&>", "ok": true, "nested": {"b": 1, "a": [1, 2]}}', "{}")
# What loses something if JSON is parsed and serialized again.
EXACT = (
    '{"price": 1.10, "large": 1e400, "i": 1234567890123456789012, "none": null, "mixed": [1, "x", {"z": 1}]}',
    *("[1, 2]", "0.1000", '"text \\u0001 \\" \\\\"', "null", "true", "[]"),
)


@dataclass(frozen=True)
class Case:
    """Settings of both that make them equal, `{prefix}` being this test's own, and what was written."""

    topic: str
    their_topic: str
    ours: dict[str, object] = field(default_factory=dict)
    theirs: dict[str, object] = field(default_factory=dict)
    payloads: Sequence[str] = (*PLAIN, *EXACT)
    read: Callable[[str], object] = str


ALL_HEADERS = Case("{prefix}.{{aggregate_type}}-events", "{prefix}.${{routedByValue}}-events")
BARE = Case(
    "{prefix}.event.{{aggregate_type}}",
    "{prefix}.event.${{routedByValue}}",
    ours={
        "header_names": "event-type=,aggregate-type=,idempotency-key=,correlation-id=,causation-id=,"
        "traceparent=,version="
    },
    theirs={ROUTER + "table.fields.additional.placement": None},
)
EXPANDED = Case(
    "{prefix}.{{aggregate_type}}-events",
    "{prefix}.${{routedByValue}}-events",
    theirs={
        ROUTER + "table.expand.json.payload": "true",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": "false",
    },
    # It parses the others and prints something different, or ends: docs/from-debezium.md.
    payloads=PLAIN,
    read=json.loads,
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own: a replication slot is the whole server's matter."""
    with postgres.Postgres(tmp_path_factory.mktemp("postgres"), {"wal_level": "logical"}) as server:
        yield server.dsn


@pytest.mark.parametrize(
    "case",
    [
        # In `make test`, tests/debezium sees to the settings, and this folder to the messages of the relay.
        pytest.param(ALL_HEADERS, id="headers", marks=pytest.mark.extended),
        pytest.param(BARE, id="bare", marks=pytest.mark.thorough(only=True)),
        pytest.param(EXPANDED, id="expanded", marks=pytest.mark.thorough(only=True)),
    ],
)
def test_debezium_and_the_relay_publish_the_same(
    database: str, stack: Stack, tmp_path: Path, case: Case
) -> None:
    """Guards against consumers that must change when the relay takes over from Debezium, or back."""
    prefix = topic_prefix()
    topics = [case.topic.format(prefix=prefix).format(aggregate_type=name) for name in ("order", "Customer")]
    for topic in topics:
        create(stack.kafka, topic, 8)

    def messages() -> list[Message]:
        """All of both topics, in an order that says nothing but each partition's own."""
        return sorted(message for topic in topics for message in read_topic(stack.kafka, topic))

    with fresh_database(database) as dsn:
        settings = load_settings(
            dsn=dsn, kafka=stack.kafka, topic=case.topic.format(prefix=prefix), **case.ours
        )
        schema.migrate(settings)
        theirs = {ROUTER + "route.topic.replacement": case.their_topic.format(prefix=prefix), **case.theirs}
        with debezium.running(dsn, stack.kafka, tmp_path, theirs, heap="256m", quick=True):
            written = _write(dsn, case.payloads)
            wait_until(lambda: len(messages()) == written, seconds=60, what="all events out of Debezium")
        by_debezium = messages()
        service.relay(settings, until_empty=True)
        by_us = [message for message in messages() if message not in by_debezium]

    assert len(by_us) == written
    assert [_seen(message, case) for message in by_us] == [_seen(message, case) for message in by_debezium]
    assert len({message.partition for message in by_us}) > 2


def _seen(message: Message, case: Case) -> tuple[object, ...]:
    """What a consumer sees, but for the headers of Debezium's own: its context, and those without a value."""
    headers = {
        name: value
        for name, value in message.headers.items()
        if value is not None and not name.startswith("__debezium.context.")
    }
    assert message.value is not None
    return message.topic, message.partition, message.key, case.read(message.value), headers


def _write(dsn: str, payloads: Sequence[str]) -> int:
    """Events with and without metadata, several of an aggregate, in several transactions; how many."""
    insert = (
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, idempotency_key, "
        "correlation_id, causation_id, traceparent, version) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)"
    )
    nothing = [None] * 5
    with psycopg.connect(dsn) as connection:
        for n, payload in enumerate(payloads):
            metadata = [f"key {n}", "c-1", "größer", TRACEPARENT, n]
            for aggregate in ("1", "größer", "7f0c", '4"2', "x" * 300):
                connection.execute(insert, ["order", aggregate, "order.placed", payload, *nothing])
            connection.execute(insert, ["Customer", f"{n}", "CustomerMoved", payload, *metadata])
            connection.commit()
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])
