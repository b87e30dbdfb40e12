"""Values framed with the id of their schema are read without a registry, beside plain ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from confluent_kafka import Message

from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer import Counts, Event
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.relay import service
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, wait_until
from tests.consumer.place import Place, effect, running
from tests.registry import FakeRegistry

_EVENTS = """
events:
  order.placed: {description: x, producer: x, owner: x, aggregate_type: order, schema: {type: object}}
"""
_FRAME = b"\0\0\0\0\7"


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (_FRAME + '{"a": "ö"}'.encode(), {"a": "ö"}),
        (_FRAME + b"null", None),
        (b'{"a": "\\u0000"}', {"a": "\0"}),
        # `flat` of another producer: what the headers lack is in the value.
        (_FRAME + b'{"event_type": "order.paid", "a": 1}', {"event_type": "order.paid", "a": 1}),
    ],
)
def test_a_frame_is_no_part_of_the_payload(value: bytes, payload: Any) -> None:
    """Guards against an event that cannot be read without a registry, and a value that is changed."""
    event = Reader({}).read(
        Message(topic="orders", partition=0, offset=0, value=value, headers=[("id", b"1")])
    )
    assert event.payload == payload
    assert event.value == value
    assert event.type == ("order.paid" if b"order.paid" in value else "")


@pytest.mark.parametrize("value", [b"\0", _FRAME, _FRAME + b"\x02a", b"\0" * 9])
def test_bytes_that_are_no_json_stay_bytes(value: bytes) -> None:
    """Guards against a consumer that ends at what another serializer has written."""
    event = Reader({}).read(
        Message(topic="orders", partition=0, offset=0, value=value, headers=[("id", b"1")])
    )
    assert event.value == value
    with pytest.raises(ValueError, match="Expecting value"):
        _ = event.payload


def test_a_topic_changes_from_plain_to_framed_values_while_all_run(
    place: Place, outbox: Outbox, registry: FakeRegistry, tmp_path: Path
) -> None:
    """Guards against a migration that loses or repeats events, and framed ones that nothing shows."""
    path = tmp_path / "catalog.yaml"
    path.write_text(_EVENTS)
    plain = outbox.settings
    given = {"format": "json_schema", "registry_url": registry.url, "catalog_file": path}
    framed = plain.model_copy(update=given)
    consumer = Place(place.dsn, place.kafka, outbox.topic()).bare(max_attempts=2)
    seen: list[Any] = []

    @consumer.on("order.placed")
    def placed(event: Event, connection: psycopg.Connection[Any]) -> None:
        seen.append(event.payload)
        # One is tried again from the inbox, one becomes a dead letter.
        if event.payload and (event.payload["n"] == 3 or seen.count(event.payload) < event.payload["n"]):
            raise ValueError("not now")
        effect(event, connection)

    def publish(settings: Any, payload: Any) -> None:
        with outbox.connect(autocommit=False) as connection:
            emit(connection, "order", json.dumps(payload), "order.placed", payload)
        service.relay(settings, until_empty=True)

    with running(consumer) as run:
        publish(plain, {"n": 1})
        wait_until(lambda: place.effects() == 1 or run.failure)
        # Registered beside the running relay and consumer; then the relay starts with the format.
        environment = {
            **{"OUTBOX_REGISTRY_URL": registry.url, "OUTBOX_CATALOG_FILE": str(path)},
            **{"OUTBOX_FORMAT": "json_schema", "OUTBOX_TOPIC": plain.topic},
        }
        assert CliRunner().invoke(cli, ["catalog", "register"], env=environment).exit_code == 0
        publish(framed, {"n": 2})
        publish(framed.model_copy(update={"registry_framing": "header"}), {"n": 0})
        publish(framed.model_copy(update={"tombstones": True}), None)
        publish(framed, {"n": 3})
        # And back.
        publish(plain, {"n": -1})
        wait_until(lambda: (place.effects(), place.inbox().get("failed")) == (5, 1) or run.failure)
        assert run.end() == Counts(handled=5, failures=3, received=2, dead_letters=1)
    starts = sorted((message.value or "-")[:1] for message in outbox.messages())
    assert starts == ["\0", "\0", "-", "{", "{", "{"]
    assert place.rows("SELECT array_agg(n ORDER BY n) FROM effects") == [([-1, 0, 1, 2, None],)]
    (message_id,) = [
        str(each) for (each,) in place.rows("SELECT message_id FROM inbox WHERE state = 'failed'")
    ]
    told = CliRunner().invoke(
        cli, ["consumer", "dead-letters", "show", message_id], env={"OUTBOX_CONSUMER_DSN": place.dsn}
    )
    assert json.loads(told.stdout)["payload"] == {"n": 3}
