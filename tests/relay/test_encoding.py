"""What a consumer sees of an event."""

import json

from outbox_pipelines.event import Event
from outbox_pipelines.relay.encoding import headers


def _event(metadata: dict[str, object] | None = None) -> Event:
    text = None if metadata is None else json.dumps(metadata)
    return Event(7, "0198", "order", "42", "order.placed", "{}", text)


def test_three_headers_are_always_there() -> None:
    """Guards against a consumer that cannot deduplicate or dispatch."""
    assert headers(_event()) == [("id", "0198"), ("event-type", "order.placed"), ("aggregate-type", "order")]


def test_metadata_and_own_headers_follow() -> None:
    """Guards against losing trace context, or turning 3 into '"3"'."""
    found = headers(_event({"traceparent": "00-ab", "version": 3, "headers": {"tenant": "eu", "hops": 2}}))
    assert found[3:] == [("traceparent", "00-ab"), ("version", "3"), ("tenant", "eu"), ("hops", "2")]


def test_own_headers_never_replace_the_relays() -> None:
    """Guards against a row whose headers forge the id that consumers deduplicate by."""
    found = headers(_event({"headers": {"id": "forged", "event-type": "other", "mine": "x"}}))
    assert dict(found) == {
        "id": "0198",
        "event-type": "order.placed",
        "aggregate-type": "order",
        "mine": "x",
    }
