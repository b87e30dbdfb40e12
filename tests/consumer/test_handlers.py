"""Handlers that would never run: refused when the consumer is set up, or reported while it works."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from outbox_pipelines.consumer import AsyncConsumer, Counts
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer.place import Place, running, uuid7


@pytest.mark.parametrize("how", ["run", "receive", "drain"])
def test_a_consumer_without_a_handler_is_not_started(place: Place, how: str) -> None:
    """Guards against offsets that are committed for events without a handler."""
    place.send(uuid7())
    with pytest.raises(SetupError, match="the consumer has no handler"):
        getattr(place.bare(), how)()
    if how == "run":
        with pytest.raises(SetupError, match="the consumer has no handler"):
            asyncio.run(getattr(place.bare(kind=AsyncConsumer), how)())
    assert place.uncommitted() == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_attempts": "5"}, "max_attempts is '5': give 1 or more, as an int"),
        ({"max_attempts": True}, "max_attempts is True"),
        ({"retry_seconds": "1"}, "retry_seconds is '1': give a number of seconds"),
        ({"outage_after": 1.5}, "outage_after is 1.5: give 0 or more"),
        ({"handler_seconds": "3"}, "handler_seconds is '3': give a number of seconds"),
        ({"dead_letter_topic": "orders"}, "dead_letter_topic is 'orders', which the consumer reads"),
        ({"dead_letter_topic": "a b/c"}, "dead_letter_topic is 'a b/c', which Kafka does not accept"),
        ({"origins": "orders"}, "origins is 'orders': write for example"),
        ({"source": "a\0b"}, "source has the character NUL"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    """Guards against a text from the environment that fails at the first failed event, or without a name."""
    with pytest.raises(SetupError, match=says):
        Place("", "broker:9092", "orders").bare(**given)


@pytest.mark.parametrize("given", [{"per_transaction": "5"}, {"per_transaction": 1.5}, {"batch": True}])
def test_numbers_of_events_are_whole(given: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"give 1 to 10,000 events, as an int"):
        Place("", "broker:9092", "orders").bare().on("order.placed", **given)


class Method:
    def handle(self, event: Any, connection: Any) -> None: ...


async def _one(event: Any) -> None: ...


@pytest.mark.parametrize("batch", [None, 10])
def test_a_handler_with_other_arguments_is_refused(batch: int | None) -> None:
    """Guards against a dead letter of each event, because the function cannot be called."""
    place = Place("", "broker:9092", "orders")
    register = place.bare().on("order.placed", batch=batch)
    for wrong in (lambda event: None, lambda a, b, c: None, lambda event, *, connection: None, Method.handle):
        with pytest.raises(SetupError, match="cannot be called with an event and a connection"):
            register(wrong)  # type: ignore[type-var]
    with pytest.raises(SetupError, match="cannot be called with an event and a connection"):
        place.bare().on_other(lambda event: None)  # type: ignore[type-var]
    with pytest.raises(SetupError, match=r"def _one\(event, connection\)"):
        place.bare(kind=AsyncConsumer).on("order.placed")(_one)  # type: ignore[type-var]
    rights: tuple[Any, ...] = (lambda a, b, c=1: None, lambda *given: None, Method().handle, max)
    for n, right in enumerate(rights):
        place.bare().on(f"type-{n}")(right)


def test_a_misspelled_type_is_reported(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against events that are passed over for a letter."""
    place.send(*(uuid7() for _ in range(3)))
    place.send(uuid7(), type="order.seen")
    consumer = place.bare()
    consumer.on("order.plcaed")(lambda event, _: None)
    consumer.on("order.seen")(lambda event, _: None)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert consumer.counts == Counts(handled=1, ignored=3)
        assert consumer.counts.ignored_types == {"order.placed": 3}
        run.end()
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [
        "events of type 'order.placed' are skipped; the handler of 'order.plcaed' has received no event "
        "yet: check the name",
        "no event of type 'order.plcaed' was received, while 3 events were skipped: 'order.placed' 3. "
        "Check the names of the types",
    ]


@pytest.mark.extended
def test_types_that_are_skipped_rightly_are_not_reported(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.send(uuid7())
    place.send(*(uuid7() for _ in range(120)), type="order.seen")
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=1, ignored=120)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
