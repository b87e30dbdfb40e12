"""What a consumer sees of an event: the payload as it is, its headers and their names."""

import json

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka.message import Encoder, EncodingError, Headers, Value
from outbox_pipelines.settings import load_settings

USUAL = [("id", "0198"), ("event-type", "order.placed"), ("aggregate-type", "order")]


def _event(metadata: dict[str, object] | None = None, payload: str = '{"n": 0.1000}') -> Event:
    text = None if metadata is None else json.dumps(metadata)
    return Event(7, "0198", "order", "42", "order.placed", payload, text)


def _encode(event: Event, **settings: object) -> tuple[Value, Headers]:
    return Encoder(load_settings(**settings)).encode(event)


def _headers(metadata: dict[str, object] | None = None, **settings: object) -> Headers:
    return _encode(_event(metadata), **settings)[1]


def test_the_payload_and_three_headers_are_always_there() -> None:
    """Guards against a consumer that cannot deduplicate or dispatch."""
    assert _encode(_event()) == ('{"n": 0.1000}', USUAL)


def test_metadata_and_own_headers_follow() -> None:
    """Guards against losing trace context, or turning 3 into '"3"'."""
    found = _headers(
        {
            "traceparent": "00-ab",
            "version": 3,
            "headers": {"tracestate": "a=1", "hops": 2, "ok": [True, None]},
        }
    )
    assert found[:3] == USUAL
    assert found[3:] == [
        ("traceparent", "00-ab"),
        ("version", "3"),
        ("tracestate", "a=1"),
        ("hops", "2"),
        ("ok", "[true, null]"),
    ]


@pytest.mark.parametrize("number", ["0.1000", "1e400", "-1.5E-400", "9" * 5000, "[0.1000, 1e400]"])
def test_a_number_in_a_header_stays_as_it_was_written(number: str) -> None:
    """Guards against floats: 0.1, Infinity, 0.0, and Python's refusal of long integers."""
    event = _event()._replace(metadata=f'{{"headers": {{"x": {number}}}}}')
    assert _encode(event)[1][3:] == [("x", number)]


@pytest.mark.parametrize("settings", [{}, {"value_format": "flat"}])
def test_a_header_too_deep_to_read_is_the_events_fault(settings: dict[str, str]) -> None:
    """Guards against a RecursionError that ends the relay at one event."""
    event = _event()._replace(metadata=f'{{"headers": {{"x": {"[" * 100_000}{"]" * 100_000}}}}}')
    with pytest.raises(EncodingError, match="nested too deeply"):
        _encode(event, **settings)


def test_own_headers_never_replace_the_relays() -> None:
    """Guards against a row whose headers forge the id that consumers deduplicate by."""
    found = _headers({"headers": {"id": "forged", "event-type": "other", "traceparent": "00", "mine": "x"}})
    assert found == [*USUAL, ("mine", "x")]


def test_headers_take_other_names() -> None:
    """Guards against consumers that must change because the relay did."""
    metadata: dict[str, object] = {"correlation-id": "c", "version": 1, "headers": {"mine": "x"}}
    names = " id = event-id, event-type=id,correlation-id=trace,version=,aggregate-type=,aggregate-id=key"
    assert _headers(metadata, header_names=names) == [
        ("event-id", "0198"),
        ("id", "order.placed"),
        ("key", "42"),
        ("trace", "c"),
        ("mine", "x"),
    ]
    assert _headers(metadata, header_names="id=event-id") == [
        ("event-id", "0198"),
        *USUAL[1:],
        ("correlation-id", "c"),
        ("version", "1"),
        ("mine", "x"),
    ]


def test_own_headers_replace_none_under_its_other_name() -> None:
    """Guards against forging by the mapped name, and against a dropped header that a row brings back."""
    own: dict[str, object] = {
        "headers": {"event-id": "forged", "id": "forged", "version": "forged", "mine": "x"}
    }
    names = "id=event-id,version="
    assert _headers(own, header_names=names) == [("event-id", "0198"), *USUAL[1:], ("mine", "x")]
    assert _headers({"headers": {"aggregate-id": "7"}}) == USUAL
    found = _headers({"headers": {"aggregate-id": "7"}}, header_names="aggregate-id=aggregate-id")
    assert found == [*USUAL, ("aggregate-id", "42")]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("event-id", "part 1 is not name=value"),
        ("event-id=id", "unknown header 'event-id': use id, event-type"),
        ("id=", "id cannot be left out"),
        ("id=a,id=b", "part 2 has a name that another has"),
        ("id=version", "two headers would have the name version"),
        ("id=x,correlation-id=x", "two headers would have the name x"),
        ("id=content-type", "content-type says how to read the value"),
        ("version=Replay-ID", "Replay-ID marks replayed events"),
    ],
)
def test_names_that_cannot_work_are_refused_where_they_enter(names: str, says: str) -> None:
    """Guards against messages without an id, or with two headers of one name."""
    with pytest.raises(SetupError, match=f"^OUTBOX_HEADER_NAMES={names}: {says}"):
        load_settings(header_names=names)


def test_a_payload_of_null_is_a_tombstone_where_that_is_switched_on() -> None:
    """Guards against compacted topics that never forget, and against values lost elsewhere."""
    gone = _event({"version": 2, "headers": {}}, "null")
    assert _encode(gone) == ("null", [*USUAL, ("version", "2")])
    for shape in ("payload", "flat", "envelope", "cloudevents"):
        assert _encode(gone, value_format=shape, tombstones=True) == (None, [*USUAL, ("version", "2")])
    assert _encode(_event(payload='"null"'), tombstones=True) == ('"null"', USUAL)
