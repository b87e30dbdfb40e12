"""Any program may write to a topic: no message ends a consumer, or keeps it from the next one."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import confluent_kafka
import pytest
from click.testing import CliRunner
from confluent_kafka import Message

from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer import Event, inbox
from outbox_pipelines.consumer.errors import UnreadableError, readable
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.inbox import Arrival
from tests import kafka_clients
from tests.conftest import wait_until
from tests.consumer.place import Place, running, uuid7

DEEP = b'{"a":' * 6_000 + b"1" + b"}" * 6_000
CLOUDEVENT = ("content-type", b"application/cloudevents+json")
NOT_UTF8 = b"\xff\xfe\x80"
Headers: TypeAlias = list[tuple[str, str | bytes | None]]


def full(**other: bytes | None) -> Headers:
    """The headers of an event, but for those that are given."""
    ours = {"id": str(uuid7()).encode(), "event-type": b"order.placed", "aggregate-type": b"order"}
    named: dict[str, str | bytes | None] = {
        **ours,
        **{name.replace("_", "-"): value for name, value in other.items()},
    }
    return list(named.items())


TEXTS = (
    *(b"", b"\0", b"a\0b", NOT_UTF8, b"\xed\xa0\x80", b"\x1b[31m\nx", b"1" * 5_000, b"order.placed"),
    *(b"x" * 3_000, "größer\u202e".encode(), b"[" * 6_000, b"-1", b"1e999", None),
)
HALF = b'{"specversion": "1.0", "id": "\\ud800", "type": "a", "source": "/"}'
VALUES = (
    *(None, b"", b"null", b"{}", b"[]", b'"x"', b"NaN", b"1" * 5_000, b'{"n": ' + b"9" * 5_000 + b"}", DEEP),
    *(NOT_UTF8, b"[" * 10_000, b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}", "{}".encode("utf-16"), HALF),
    b'{"specversion": "1.0", "id": 1e400, "type": [], "source": {}}',
    b'{"specversion": null, "id": null, "type": null, "source": null, "data": null}',
    b'{"specversion": "1.0", "id": "a\\u0000b", "type": "\\u0000", "source": "/"}',
    b'{"event_id": {}, "event_type": 1, "aggregate_type": null, "aggregate_id": [], "payload": 1, '
    b'"timestamp": 0}',
    b'{"event_id": "\\udfff", "event_type": "a", "aggregate_type": "b", "aggregate_id": "\\u0000", '
    b'"payload": 1, "timestamp": 0}',
    b'{"event_type": "\\ud83d", "idempotency_key": "\\ud83d"}',
)
TIMES = (0, -1, -(2**63), 2**63 - 1, 253_402_300_800_000, 1_700_000_000_000)
NAMES = (
    *("id", "event-type", "aggregate-type", "aggregate-id", "idempotency-key", "correlation-id", "version"),
    *("causation-id", "traceparent", "content-type", "other", ""),
)


def malformed(count: int) -> Iterator[Message]:
    draw = random.Random(14)
    for offset in range(count):
        headers = full() if draw.random() < 0.5 else []
        headers += [(draw.choice(NAMES), draw.choice(TEXTS)) for _ in range(draw.randrange(5))]
        draw.shuffle(headers)
        if draw.random() < 0.3:
            headers.append(CLOUDEVENT)
        value = draw.choice(VALUES)
        if value and draw.random() < 0.3:
            cut = bytearray(value[: draw.randrange(len(value)) + 1])
            cut[draw.randrange(len(cut))] = draw.randrange(256)
            value = bytes(cut)
        yield Message(
            topic="order-events",
            partition=0,
            offset=offset,
            key=draw.choice(TEXTS),
            value=value,
            headers=headers or None,
            timestamp=(1, draw.choice(TIMES)),
        )


def test_10_000_malformed_messages_are_events_or_unreadable() -> None:
    """Guards against a message that ends the process each time it starts."""
    reader = Reader({})
    events = unreadable = 0
    for message in malformed(10_000):
        try:
            event = reader.read(message)
        except UnreadableError as error:
            unreadable += 1
            arrival = Arrival.of_no_event(uuid7(), message)
            texts = [str(error)]
        else:
            events += 1
            event._identity("orders", by_key=True)
            content = event._content(by_key=False)
            arrival = Arrival.of(event, event._identity("orders", by_key=False), message, content)
            texts = [event.type, str(event)]
            # The handler gets any error in the value, as the error that is documented.
            with suppress(ValueError):
                _ = event.payload
        # What goes into the inbox, which is PostgreSQL's text.
        for text in (readable(each) for each in (arrival.key, *texts)):
            assert text.isprintable()
            text.encode()
        assert isinstance(json.loads(inbox._headers(message)), list)
        assert 1970 <= arrival.sent_at.year <= 9999
    # Both kinds are among them, or the fuzz has lost its teeth.
    assert events > 1_000
    assert unreadable > 1_000


# Each of them ended a consumer, or what shows its dead letters.
ENDED: dict[str, tuple[bytes, Headers]] = {
    "deep, and said to be a CloudEvent": (DEEP, [*full(), CLOUDEVENT]),
    "deep, without headers": (DEEP, []),
    "the id is not UTF-8": (b"{}", full(id=NOT_UTF8)),
    "the idempotency key is not UTF-8": (b"{}", full(idempotency_key=NOT_UTF8)),
    "the type is not UTF-8": (b"{}", full(event_type=NOT_UTF8)),
    "an id with NUL and no type": (b"{}", [("id", b"a\0b")]),
    "an id that is half of a pair": (HALF, []),
    "no type, and a header of others that is not UTF-8": (b"\x1b[31m", [("id", b"x"), ("other", NOT_UTF8)]),
    "half-deep: Python reads it, and does not write it": (b"[" * 700 + b"]" * 700, []),
}


@pytest.mark.parametrize("dedupe", ["id", "key"])
def test_they_become_dead_letters_and_the_next_event_is_handled(place: Place, dedupe: Any) -> None:
    """Guards against a consumer that ends at each start, and dead letters that no command can show."""
    producer = kafka_clients.Producer({"bootstrap.servers": place.kafka, "linger.ms": 0})
    for value, headers in ENDED.values():
        producer.produce(place.topic, value, headers=headers, partition=0)
    producer.produce(place.topic, b"{}", headers=full(id=b"good"), partition=0)
    assert producer.flush(20) == 0
    put_with_header_name(place, NOT_UTF8)
    handled: list[Event] = []
    consumer = place.bare(dedupe=dedupe)
    consumer.on("order.placed")(lambda event, _: handled.append(event))
    with running(consumer) as run:
        wait_until(
            lambda: (handled and place.inbox().get("failed") == len(ENDED) + 1) or run.failure,
            what=f"{len(ENDED)} dead letters and an event",
        )
        counts = run.end()
        counts = run.end()
    assert (counts.handled, counts.dead_letters) == (1, len(ENDED) + 1)
    assert handled[0].id == "good"

    environment = {"OUTBOX_CONSUMER_DSN": place.dsn}
    listed = CliRunner().invoke(cli, ["consumer", "dead-letters", "list"], env=environment)
    assert listed.exit_code == 0
    assert listed.output.count("(no event)") == len(ENDED) + 1
    for (message_id,) in place.rows("SELECT message_id FROM inbox WHERE state = 'failed'"):
        shown = CliRunner().invoke(
            cli, ["consumer", "dead-letters", "show", str(message_id)], env=environment
        )
        assert shown.exit_code == 0, shown.exception
        assert json.loads(shown.output)["state"] == "failed"
        assert "\x1b" not in shown.output


def put_with_header_name(place: Place, name: bytes) -> None:
    """A message as a client in C can write it; Python's takes names that are text alone."""
    [path] = (Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka-*.so*")
    kafka = ctypes.CDLL(str(path))
    for function in ("rd_kafka_new", "rd_kafka_conf_new"):
        getattr(kafka, function).restype = ctypes.c_void_p
    text = ctypes.create_string_buffer(500)
    conf = ctypes.c_void_p(kafka.rd_kafka_conf_new())
    kafka.rd_kafka_conf_set(conf, b"bootstrap.servers", place.kafka.encode(), text, 500)
    client = ctypes.c_void_p(kafka.rd_kafka_new(0, conf, text, 500))
    # RD_KAFKA_VTYPE_… of rdkafka.h: topic, partition, value, header, end.
    size = ctypes.c_size_t
    refused = kafka.rd_kafka_producev(
        client, 1, place.topic.encode(), 3, ctypes.c_int32(0), 4, b"{}", size(2), 9, name, b"x", size(1), 0
    )
    assert refused == 0
    assert kafka.rd_kafka_flush(client, 20_000) == 0
    kafka.rd_kafka_destroy(client)
