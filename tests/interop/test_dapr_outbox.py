"""What Dapr's own outbox does, as docs/dapr.md states it, and events from the table of its state store."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic

from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, patience, topic_prefix, wait_until
from tests.interop.conftest import Start
from tests.interop.sidecar import PUBSUB, STORE, App, component
from tests.kafka_clients import AdminClient, Consumer

TRIGGER = Path(__file__).parents[2] / "examples" / "dapr_shop" / "state_trigger.sql"
# An etag that no state has: the transaction fails.
STALE: Final[dict[str, Any]] = {
    "etag": "7d1ee1ac-0b9c-4c4e-ae46-f6fdb0ed0b3d",
    "options": {"concurrency": "first-write"},
}
# Key, data and datacontenttype.
EXPECTED: Final = [(None, "map[id:2 total:5]", "text/plain"), (None, {"id": 3}, "application/json")]


def _store(outbox: Outbox, topic: str | None = None, **more: str) -> dict[str, str]:
    """The component of the state store, with Dapr's outbox to this topic."""
    metadata = {"connectionString": outbox.settings.dsn.reveal()}
    if topic:
        metadata |= {"outboxPublishPubsub": PUBSUB, "outboxPublishTopic": topic, **more}
    return {"store": component(STORE, "state.postgresql", "v2", metadata)}


def _upsert(key: str, value: object, **more: Any) -> dict[str, Any]:
    return {"operation": "upsert", "request": {"key": key, "value": value, **more}}


def _transaction(*operations: dict[str, Any]) -> dict[str, Any]:
    return {"operations": list(operations)}


def _values(kafka: str, topic: str) -> list[tuple[bytes | None, Any]]:
    """Key and value of each message of a topic with one partition; `read_topic` expects keys."""
    reader = Consumer({"bootstrap.servers": kafka, "group.id": uuid.uuid4().hex, "enable.auto.commit": False})
    try:
        _, end = reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=60)
        reader.assign([TopicPartition(topic, 0, 0)])
        found: list[tuple[bytes | None, Any]] = []
        while len(found) < end:
            for message in reader.consume(end - len(found), timeout=1):
                assert message.error() is None, message.error()
                found.append((message.key(), json.loads(message.value() or b"null")))
        return found
    finally:
        reader.close()


@pytest.fixture
def topic(outbox: Outbox) -> Iterator[str]:
    """Where Dapr's outbox publishes; both topics have one partition, so that all is in order."""
    name = topic_prefix()
    admin = AdminClient({"bootstrap.servers": outbox.settings.kafka})
    for made in admin.create_topics([NewTopic(each, 1, 1) for each in (name, _internal(name))]).values():
        made.result(patience(10))
    yield name
    # The end of the session removes those that begin with this run's name.
    admin.delete_topics([_internal(name)])[_internal(name)].result(30)


def _internal(topic: str) -> str:
    """Made of namespace, application and topic."""
    return f"defaultshop{topic}outbox"


def test_a_single_save_publishes_nothing_and_a_transaction_does(
    outbox: Outbox, start: Start, topic: str
) -> None:
    """Guards against a page that describes another outbox: no key, Go's printing, the marker as id."""
    app = App([{"pubsubname": PUBSUB, "topic": topic, "route": "/events"}])
    sidecar = start(app, components=_store(outbox, topic))
    metadata = {"outboxPublishPubsub": PUBSUB, "outboxPublishTopic": topic}
    single = [{"key": "order-1", "value": {"total": 5}, "metadata": metadata}]
    assert sidecar.call("POST", f"/v1.0/state/{STORE}", single)[0] == 204
    operations = [
        _upsert("order-2", {"id": 2, "total": 5}),
        _upsert("order-3", {"id": 3}, contentType="application/json", metadata={"type": "order.placed"}),
        {"operation": "delete", "request": {"key": "order-1"}},
    ]
    assert sidecar.call("POST", f"/v1.0/state/{STORE}/transaction", {"operations": operations})[0] == 204
    wait_until(lambda: len(app.received) == 2, seconds=30, what="both events")
    internal, outward = (_values(outbox.settings.kafka, each) for each in (_internal(topic), topic))
    assert [(key, value["data"], value["datacontenttype"]) for key, value in outward] == EXPECTED
    assert [(key, value["data"], value["datacontenttype"]) for key, value in internal] == EXPECTED
    assert all(value["id"].startswith("outbox-") for _, value in outward)
    assert [(value["type"], value["source"]) for _, value in outward] == [
        ("com.dapr.event.sent", "shop"),
        ("order.placed", "shop"),
    ]
    # A message a second, each after the one before: the internal subscriber sleeps.
    first, second = (int(request.headers["__timestamp"]) for request in app.received)
    assert second - first >= 1000


def test_dapr_publishes_before_it_commits(outbox: Outbox, start: Start, topic: str) -> None:
    """Guards against a page that is unfair: the internal topic has the event of a transaction that failed."""
    sidecar = start(App([]), components=_store(outbox, topic))
    body = {"operations": [_upsert("order-1", {"id": 1}, **STALE)]}
    assert sidecar.call("POST", f"/v1.0/state/{STORE}/transaction", body)[0] == 500
    assert [value["data"] for _, value in _values(outbox.settings.kafka, _internal(topic))] == ["map[id:1]"]
    with outbox.connect() as connection:
        assert connection.execute("SELECT key FROM state").fetchall() == []


@pytest.mark.parametrize("discards", ["false", "true"])
def test_a_failed_transaction_holds_up_later_events(
    outbox: Outbox, start: Start, topic: str, discards: str
) -> None:
    """Guards against a page that is unfair: after 10 s it queries the store without a pause or an end."""
    sidecar = start(None, components=_store(outbox, topic, outboxDiscardWhenMissingState=discards))
    path = f"/v1.0/state/{STORE}/transaction"
    assert sidecar.call("POST", path, {"operations": [_upsert("order-1", {"id": 1}, **STALE)]})[0] == 500
    assert sidecar.call("POST", path, {"operations": [_upsert("order-2", {"id": 2})]})[0] == 204

    def transactions() -> int:
        query = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        with outbox.connect() as connection:
            [(count,)] = connection.execute(query).fetchall()
        return int(count)

    wait_until(lambda: transactions() > 10_000, seconds=60, what="a query after the other")
    assert _values(outbox.settings.kafka, topic) == []
    assert not re.search("rejecting for later|discarding message", sidecar.log_text())


def test_a_sidecar_without_an_application_publishes_too(outbox: Outbox, start: Start, topic: str) -> None:
    """Guards against a page that restricts Dapr's outbox to applications that listen."""
    job = start(None, components=_store(outbox, topic))
    body = {"operations": [_upsert("order-1", {"id": 1})]}
    assert job.call("POST", f"/v1.0/state/{STORE}/transaction", body)[0] == 204
    wait_until(lambda: _values(outbox.settings.kafka, topic), what="the event")


def test_the_trigger_makes_events_of_the_state(outbox: Outbox, start: Start) -> None:
    """Guards against a save, single or in a transaction, without its event, and against another order."""
    app = App([{"pubsubname": PUBSUB, "topic": outbox.topic(), "route": "/events"}])
    sidecar = start(app, components=_store(outbox))
    with outbox.connect() as connection:
        connection.execute(TRIGGER.read_bytes())
    state = f"/v1.0/state/{STORE}"
    assert sidecar.call("POST", state, [{"key": "order-42", "value": {"total": 5}}])[0] == 204
    operations = [_upsert("order-42", {"total": 6}), _upsert("other-1", "no event")]
    assert sidecar.call("POST", f"{state}/transaction", {"operations": operations})[0] == 204
    failed = {"operations": [_upsert("order-42", {"total": 7}), _upsert("order-1", {"id": 1}, **STALE)]}
    assert sidecar.call("POST", f"{state}/transaction", failed)[0] == 500
    assert sidecar.call("DELETE", f"{state}/order-42")[0] == 204
    settings = load_settings(
        dsn=outbox.settings.dsn.reveal(),
        kafka=outbox.settings.kafka,
        topic=outbox.settings.topic,
        value_format="cloudevents",
    )
    assert service.relay(settings, until_empty=True).events == 3
    wait_until(lambda: len(app.received) == 3, what="three events")
    assert [(r.event["subject"], r.event["type"], r.event["data"]) for r in app.received] == [
        ("42", "order.created", {"total": 5}),
        ("42", "order.changed", {"total": 6}),
        ("42", "order.removed", None),
    ]
