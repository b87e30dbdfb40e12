"""A service that a handler needs is unavailable: no event is blamed or becomes a dead letter for it."""

from __future__ import annotations

import asyncio
import socket
import uuid
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_pipelines.consumer import Event, OutageError, RefusedError, handler_breakers
from outbox_pipelines.consumer.errors import HandlerTimeoutError
from outbox_pipelines.consumer.handler_breakers import Breaker, is_unreachable, policy_of
from outbox_pipelines.errors import SetupError
from tests.conftest import either, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running, uuid7

Connection = psycopg.Connection[Any]
ERROR = ValueError


class UnavailableError(Exception):
    """As a client of some service has it."""


class Dependent:
    """A handler whose service is unavailable until it is healed; even then it refuses some events."""

    def __init__(self, *refused: int, error: type[Exception] = UnavailableError) -> None:
        self.healed = False
        self.refused = refused
        self.error = error
        self.tried: list[int] = []

    def __call__(self, event: Event, connection: Connection) -> None:
        self.tried.append(event.payload["n"])
        if not self.healed or event.payload["n"] in self.refused:
            raise self.error("503")
        effect(event, connection)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_breakers, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(handler_breakers, "_LONGEST_PAUSE", 0.1)


def ordered(place: Place) -> bool:
    rows = place.rows("SELECT array_agg(n ORDER BY seq) FROM effects GROUP BY key")
    return all(numbers == sorted(numbers) for (numbers,) in rows)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch", either(None, 20))
def test_an_outage_makes_no_dead_letters(place: Place, batch: int | None) -> None:
    """Guards against a backlog that is dead after an evening without some service."""
    place.load(30, keys=15)
    # Of another key: it would wait behind the events of its own.
    place.put('{"n": 0}', key="other", id=str(uuid7()), event_type="order.seen", aggregate_type="order")
    handler = Dependent()
    seen: list[Event] = []
    # Long enough for five events to fail once before one fails twice.
    consumer = place.bare(max_attempts=2, retry_seconds=2.0, outage_after=5)

    @consumer.on("order.placed", batch=batch)
    def handle(events: Any, connection: Connection) -> None:
        for event in events if batch else [events]:
            handler(event, connection)

    consumer.on("order.seen")(lambda event, _: seen.append(event))
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0 and seen, seconds=60, what="other events")
        before = len(handler.tried)
        wait_until(lambda: len(set(handler.tried[before:])) >= 6, seconds=60, what="tries of others")
        assert place.inbox() == {"waiting": 30} | {
            state: count for state, count in place.inbox().items() if state == "processed"
        }
        assert place.value("SELECT max(attempts) FROM inbox WHERE state = 'waiting'") <= 1
        handler.healed = True
        wait_until(lambda: place.effects() == 30, seconds=60, what="all effects")
        counts = run.end()
    assert (counts.dead_letters, counts.outages) == (0, 1)
    assert ordered(place)
    assert "waiting" not in place.inbox()


@pytest.mark.extended
def test_without_the_breaker_they_are_dead(place: Place) -> None:
    place.load(30, keys=30)
    consumer = place.bare(max_attempts=2, retry_seconds=0.05, outage_after=0)
    consumer.on("order.placed")(Dependent())
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"failed": 30}, seconds=60, what="dead letters")
        assert run.end().outages == 0


@pytest.mark.usefixtures("quick")
def test_events_that_are_to_blame_do_not_hold_the_others(place: Place) -> None:
    """Guards against a few refused events in a row that stop their handler for good."""
    place.load(40, keys=40)
    handler = Dependent(*range(5))
    handler.healed = True
    consumer = place.bare(max_attempts=2, retry_seconds=0.05, outage_after=5)
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 35, seconds=60, what="the others")
        run.end()
    inbox = place.inbox()
    assert inbox.get("waiting", 0) + inbox.get("failed", 0) == 5


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", either("said", "by its class"))
def test_an_outage_that_is_reported(place: Place, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a pause that `outbox consumer status` hides, and a log of attempts that do not count."""
    place.load(3, keys=3)
    handler = Dependent(error=OutageError if how == "said" else ConnectionResetError)
    consumer = place.bare(max_attempts=1, on_error={ConnectionError: "outage"})
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0 and len(handler.tried) >= 4, what="some tries")
        assert place.inbox() == {"waiting": 3}
        [paused] = consumer.backlog()[0].paused
        assert (paused.event_type, paused.error) == ("order.placed", f"{handler.error.__name__}: 503")
        # Since the first try, and until the next one: that is not the five minutes of an attempt that counts.
        assert paused.seconds > 0
        assert paused.next_seconds <= 0.1
        handler.healed = True
        wait_until(lambda: place.effects() == 3, what="all effects")
        assert consumer.backlog()[0].paused == ()
        assert run.end().dead_letters == 0
    assert "no attempt counts" in caplog.text
    assert "in attempt" not in caplog.text


def test_what_is_not_worth_another_attempt_is_dead_at_once(place: Place) -> None:
    place.load(4, keys=4)
    errors: list[Exception] = [RefusedError("no"), KeyError("customer"), ValueError("later")]
    consumer = place.bare(retry_seconds=300, on_error={LookupError: "dead_letter"})

    @consumer.on("order.placed")
    def handle(event: Event, connection: Connection) -> None:
        if event.payload["n"] < 3:
            raise errors[event.payload["n"]]
        effect(event, connection)

    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end().dead_letters == 2
    assert place.rows(
        "SELECT state, attempts, last_error FROM inbox WHERE state <> 'processed' ORDER BY 3"
    ) == [
        ("failed", 1, "KeyError: 'customer'"),
        ("failed", 1, "RefusedError: no"),
        ("waiting", 1, "ValueError: later"),
    ]


@pytest.mark.extended
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_same_with_each_driver(place: Place, driver: str) -> None:
    place.load(10, keys=10)
    away: list[int] = [1]
    tried: list[str] = []

    async def handle(event: Event, transaction: Any) -> None:
        tried.append(event.id)
        if away:
            raise UnavailableError("503")
        await test_async.effect(event, transaction)

    async def scenario() -> None:
        consumer = test_async.consumer(place, driver, handle, max_attempts=1, outage_after=3)
        async with test_async.running(consumer.run) as counts:
            await test_async.until(lambda: len(tried) >= 6, "some tries")
            away.clear()
            await test_async.until(lambda: place.effects() >= 8, "all effects")
        # With one attempt each, those before the third were dead by then.
        assert (counts[0].handled, counts[0].dead_letters, counts[0].outages) == (8, 2, 1)

    asyncio.run(scenario())


def test_a_breaker() -> None:
    """The states, without a clock."""
    first, second, third = (uuid.uuid4() for _ in range(3))
    it = Breaker(2, 5)
    assert not it.failed(first, 0, ERROR)
    assert not it.failed(first, 0, ERROR)
    it.succeeded()
    assert not it.failed(second, 0, ERROR)
    assert it.may_call(0)
    assert it.failed(third, 0, ERROR)
    assert (it.may_call(0.9), it.may_call(1)) == (False, True)
    assert not it.failed(first, 1, ERROR)
    assert (it.may_call(2.9), it.may_call(3)) == (False, True)
    it.succeeded()
    assert it.may_call(0)
    assert it.failed(first, 10, ERROR, outage=True)
    assert not it.may_call(10.5)
    never = Breaker(0, 5)
    assert not any(never.failed(uuid.uuid4(), 0, ERROR) for _ in range(100))


def test_policies() -> None:
    given: Any = {OSError: "outage", FileNotFoundError: "dead_letter", OutageError: "retry"}
    found = [
        policy_of(error(), given) for error in (ConnectionError, FileNotFoundError, OutageError, KeyError)
    ]
    assert found == ["outage", "dead_letter", "retry", "retry"]
    assert policy_of(RefusedError(), {}) == "dead_letter"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"on_error": {"ConnectionError": "outage"}}, "'ConnectionError': give exception classes"),
        (
            {"on_error": {KeyError: "skip"}},
            "on_error of KeyError is 'skip': give retry or dead_letter or out",
        ),
        ({"outage_after": -1}, "outage_after is -1"),
    ],
)
def test_policies_that_do_not_fit_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Place("", "broker:9092", "orders").bare(**given)


class DistantError(ConnectionError):
    """As a client of some service has it."""


@pytest.mark.extended
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("events", [1, 2, 12])
def test_a_quiet_service_whose_dependency_cannot_be_reached(place: Place, events: int) -> None:
    """Guards against dead letters made by three minutes without a service, since 20 events did not come."""
    place.load(events, keys=events)
    handler = Dependent(error=DistantError)
    consumer = place.bare(max_attempts=3, retry_seconds=0.05)
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: len(handler.tried) >= 3 * events + 10, seconds=60, what="many tries")
        assert place.inbox() == {"waiting": events}
        handler.healed = True
        wait_until(lambda: place.effects() == events, seconds=60, what="all effects")
        counts = run.end()
    assert (counts.dead_letters, counts.outages) == (0, 1)


@pytest.mark.extended
@pytest.mark.usefixtures("quick")
def test_a_quiet_service_whose_events_fail_alike(place: Place) -> None:
    """Guards against the same where the error does not say what it means: the last attempt is not taken."""
    place.load(12, keys=12)
    handler = Dependent()
    # Long enough for three events to fail once before one fails twice.
    consumer = place.bare(max_attempts=2, retry_seconds=3.0)
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: len(handler.tried) >= 12 * 2 + 10, seconds=60, what="many tries")
        assert place.inbox() == {"waiting": 12}
        handler.healed = True
        wait_until(lambda: place.effects() == 12, seconds=60, what="all effects")
        assert run.end().dead_letters == 0


@pytest.mark.usefixtures("quick")
def test_one_event_that_cannot_reach_anything_is_dead(place: Place) -> None:
    """Guards against an event, such as one with a wrong address, that holds the others of its handler."""
    place.load(40, keys=40)
    handler = Dependent(0, error=DistantError)
    handler.healed = True
    consumer = place.bare(max_attempts=3, retry_seconds=0.0)
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 39, seconds=60, what="the others")
        for n in range(40, 50):
            if "failed" in place.inbox():
                break
            place.load(1, first=n, keys=1)
            wait_until(partial(lambda n: place.effects() == n, n), seconds=60, what="an event behind it")
        assert run.end().dead_letters == 1


def test_what_is_believed_when() -> None:
    one, two, three = (uuid.uuid4() for _ in range(3))

    def opened(*failures: tuple[UUID, type[Exception]], limit: int = 20, works: bool = True) -> list[bool]:
        """Whether each failure opens a breaker; the last one is that of the event's last attempt."""
        breaker = Breaker(limit, 5, has_worked=works)
        return [
            breaker.failed(of, 0.0, kind, unreached=kind is DistantError, last=n == len(failures))
            for n, (of, kind) in enumerate(failures, 1)
        ]

    unreached = (one, DistantError)
    # Attempts at one event that reach nothing: the third.
    assert opened(*[unreached] * 3) == [False, False, True]
    # Not if one of them has another error.
    assert opened(unreached, (one, ERROR), *[unreached] * 4) == [False] * 6
    # Its last attempt, if this process knows of no success.
    assert opened(unreached, works=False) == [True]
    assert opened(unreached) == [False]
    assert opened((one, ERROR), works=False) == [False]
    # Three events that fail alike, before the first of them is dead.
    alike = [(one, ERROR), (two, ERROR), (three, ERROR)]
    assert opened(*alike, (one, ERROR)) == [False, False, False, True]
    assert opened(*alike[:2], (one, ERROR)) == [False, False, False]
    assert opened(*alike[:2], (three, KeyError), (one, ERROR)) == [False] * 4
    # As many events as the limit, whatever their errors are; with 0 none.
    assert opened(*alike[:2], (three, KeyError), unreached, limit=3) == [False, False, True, False]
    assert opened(*[(uuid.uuid4(), DistantError) for _ in range(50)], limit=0, works=False) == [False] * 50


def test_errors_that_say_that_a_service_cannot_be_reached() -> None:
    named = type("ConnectError", (type("TransportError", (Exception,), {}),), {})
    for error in (ConnectionResetError(), TimeoutError(), socket.gaierror(), named()):
        assert is_unreachable(error, {}), error
        assert not is_unreachable(error, {Exception: "retry"}), error
    for other in (HandlerTimeoutError(), ERROR(), FileNotFoundError(), psycopg.OperationalError()):
        assert not is_unreachable(other, {}), other
