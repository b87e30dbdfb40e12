"""Parts of the consumer's work, each alone: without a server, a member of a group or the other parts."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_pipelines.consumer import Consumer, Event, kafka_clients, limits, membership, testing, work
from outbox_pipelines.consumer.consumer import drive
from outbox_pipelines.consumer.consumer_database import Statement
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import ConsumerError, HandlerTimeoutError, OutageError, StoppedError
from outbox_pipelines.consumer.figures import Counts, Types
from outbox_pipelines.consumer.handler_registry import Handler
from outbox_pipelines.consumer.items import Item, Pace, groups
from outbox_pipelines.consumer.settlement import Settlement
from outbox_pipelines.consumer.work import _following
from outbox_pipelines.errors import SetupError, UnavailableError
from tests.conftest import wait_until

CONFLICT = psycopg.errors.SerializationFailure("conflict")
OUTAGE = psycopg.OperationalError("the connection is lost")


def _plan(**given: Any) -> Any:
    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def stay() -> None: ...

    pauses: list[float] = []
    plan = {
        "source": "billing",
        "waits": True,
        "max_attempts": 1,
        "copies": None,
        "pause": pause,
        "stay": stay,
    }
    return SimpleNamespace(**(plan | {"is_stopped": lambda: False, "pauses": pauses} | given))


class _Attempts:
    """An operation with these results, one after the other."""

    def __init__(self, *results: Exception | int) -> None:
        self.left = [*results]

    async def __call__(self) -> int:
        result = self.left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_a_conflict_is_repeated_at_once_and_an_outage_after_a_pause() -> None:
    plan = _plan()
    retry = DatabaseRetry(plan, SimpleNamespace(warnings=0))
    assert drive(retry.attempt(_Attempts(CONFLICT, CONFLICT, 1))) == 1
    assert not plan.pauses
    assert drive(retry.attempt(_Attempts(OUTAGE, OUTAGE, 2))) == 2
    assert plan.pauses == [0.1, 0.2]
    with pytest.raises(psycopg.errors.SerializationFailure):
        drive(retry.attempt(_Attempts(CONFLICT, CONFLICT, CONFLICT, 3)))


def test_an_attempt_whose_handler_was_called_is_not_repeated() -> None:
    retry = DatabaseRetry(_plan(), SimpleNamespace(warnings=0))

    async def attempt() -> None:
        retry.is_called = True
        raise OUTAGE

    with pytest.raises(psycopg.OperationalError):
        drive(retry.attempt(attempt))


@pytest.mark.parametrize(
    ("given", "error", "raised"),
    [
        ({"waits": False}, OUTAGE, UnavailableError),
        ({"is_stopped": lambda: True}, OUTAGE, StoppedError),
        ({}, psycopg.errors.UndefinedTable("no table"), ConsumerError),
        ({}, SetupError("wrong"), SetupError),
    ],
)
def test_what_an_operation_does_not_wait_for(
    given: dict[str, Any], error: Exception, raised: type[Exception]
) -> None:
    retry = DatabaseRetry(_plan(**given), SimpleNamespace(warnings=0))
    with pytest.raises(raised):
        drive(retry.run(_Attempts(error, 1)))


def _item(**handler: Any) -> Item:
    made = Handler(lambda event, connection: None, lambda event: event, **handler) if handler else None
    return Item(None, "01890a5d-ac96-774b-bcce-b302099a8057", handler=made)


def test_groups_are_what_one_transaction_can_have() -> None:
    batch, single, skipped = _item(batch=2), _item(per_transaction=1), _item()
    shared = [_item(per_transaction=9) for _ in range(4)]
    wrong = Item(None, "", error="no event")
    items = [batch, batch, batch, single, *shared[:2], skipped, *shared[2:], wrong]
    pace = Pace()
    sizes = [len(each) for each in groups(items, pace, shares=True)]
    assert sizes == [2, 1, 1, 5, 1]
    pace.events = 3
    assert [len(each) for each in groups(items, pace, shares=True)] == [2, 1, 1, 3, 2, 1]


def test_what_is_recorded_with_the_commit_of_the_event_before() -> None:
    """Guards against the record of an event that is not the next one to be recorded alone."""
    alone, wrong = _item(per_transaction=1), _item(per_transaction=1)
    wrong.error = "it does not fit"
    assert _following([alone], ()) is alone
    for each in (wrong, _item(), _item(batch=2), _item(per_transaction=2)):
        assert _following([each], ()) is None
    assert _following([], ()) is None
    assert _following([alone], (alone.id,)) is None


class _Noting(testing._NoDatabase):
    """Notes which events are said to follow a commit."""

    def __init__(self) -> None:
        super().__init__(None)
        self.followed: list[str | None] = []

    async def end_handling(self, transaction: object, following: Statement | None = None) -> bool:
        self.followed.append(None if following is None else following[1]["id"])
        return True


@pytest.mark.parametrize(
    ("shared", "seconds", "polled"),
    [(1, 0.001, [1, 2, 4, 8, 16, 32, 32]), (1, 1.0, [1, 1, 1]), (7, 0.001, [7, 7, 7, 7])],
)
def test_as_many_messages_are_polled_as_are_handled_soon(
    monkeypatch: pytest.MonkeyPatch, shared: int, seconds: float, polled: list[int]
) -> None:
    """Guards against an inbox that waits for 32 slow handlers, and a round of calls for each fast one."""
    now = [0.0]
    consumer = Consumer(source="billing", topics=["events"], kafka={"bootstrap.servers": "b"}, dsn="")

    def handle(event: Event, connection: object) -> None:
        now[0] += seconds

    consumer.on_other(per_transaction=shared)(handle)

    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: now[0]))
    database = _Noting()
    works = work.Work(testing._plan(consumer, database), consumer, testing._Read(), database)  # type: ignore[arg-type]
    found = []
    for _ in polled:
        found.append(works.at_once)
        messages = [testing._Message(testing.make_event("x")) for _ in range(works.at_once)]
        drive(works.take(messages, testing._Alone()))  # type: ignore[arg-type]
        if shared == 1:
            assert database.followed[-found[-1] :] == [*(each.event.id for each in messages[1:]), None]
    assert found == polled


class _Returning(testing._Alone):
    """A member whose partition is away when the first message's turn has come, and back at the second's."""

    def __init__(self) -> None:
        self.turns = 0
        self.done_with: list[object] = []

    @property  # type: ignore[misc]
    def has_left(self) -> bool:
        self.turns += 1
        return self.turns == 1

    def has(self, message: object) -> bool:
        return self.turns != 1

    def done(self, messages: Sequence[object]) -> None:
        self.done_with += messages


def test_a_partition_that_comes_back_begins_with_what_was_skipped() -> None:
    """Guards against an event that is handled before an earlier one of its key, or whose offset skips it."""
    consumer = Consumer(source="billing", topics=["events"], kafka={"bootstrap.servers": "b"}, dsn="")
    handled: list[str] = []

    @consumer.on_other
    def handle(event: Event, connection: object) -> None:
        handled.append(event.type)

    database = _Noting()
    works = work.Work(testing._plan(consumer, database), consumer, testing._Read(), database)  # type: ignore[arg-type]
    member = _Returning()
    messages = [
        testing._Message(testing.make_event(name, partition=partition))
        for name, partition in (("first", 0), ("second", 0), ("another's", 1))
    ]
    drive(works.take(messages, member))  # type: ignore[arg-type]
    assert (handled, member.done_with) == (["another's"], messages[2:])


def test_no_alarm_rings_behind_a_handler() -> None:
    """Guards against an interruption that comes as the handler returns, and one of the next work later."""

    async def ended() -> None:
        # As where the alarm comes before `__aexit__` has begun.
        await alarm.__aenter__()

    async def hangs() -> None:
        async with alarm:
            wait_until(lambda: False)

    with limits.alarms(0.01) as alarm:
        drive(ended())
        wait_until(lambda: signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0))
        with pytest.raises(HandlerTimeoutError):
            drive(hangs())
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("refuses", ["its settings", "a copy"])
def test_a_copy_that_cannot_be_sent_is_the_consumers_own_error(
    monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """Guards against a client without the callback for tokens, and a refusal that ends the consumer."""

    class Client:
        def __init__(self, given: dict[str, Any], *, logger: object) -> None:
            settings.update(given)
            if refuses == "its settings":
                raise KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED))

        def produce(self, *given: object, **named: object) -> None:
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))

    settings: dict[str, Any] = {}
    monkeypatch.setattr(kafka_clients, "Producer", Client)
    login = {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": lambda _: ("token", 0.0)}
    copies = kafka_clients.DeadLetterTopic({"group.id": "billing", **login}, "dead")
    with pytest.raises(ConsumerError, match=r"^dead rejects the copy of a dead letter: "):
        copies.send(Mock(headers=list), source="billing", attempts=1, error="")
    assert login.items() <= settings.items()
    assert "group.id" not in settings


def test_a_group_is_not_left_because_a_second_client_gets_no_token() -> None:
    """Guards against an outage of the token's server that ends a consumer which only compares itself."""

    def refuses() -> Any:
        raise SetupError("Kafka's client rejects its settings: OAuth token not set")

    assert not membership.LostClients(refuses, "events")._other_finds(lambda other: True)


class _Inbox:
    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    async def receive(self, arrivals: Any, **more: Any) -> dict[Any, int]:
        self.received.append(more)
        return {each.message_id: 1 for each in arrivals}


@pytest.mark.parametrize("policy", ["retry", "outage", "dead_letter"])
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_failed_event_is_settled_by_what_its_failure_means(policy: str, attempts: int) -> None:
    async def judge(*given: Any) -> str:
        return policy

    async def run(do: Any) -> Any:
        return await do()

    inbox, counts = _Inbox(), Counts()
    blamed = SimpleNamespace(blamed={})
    message = SimpleNamespace(
        topic=lambda: "events", partition=lambda: 0, offset=lambda: 0, timestamp=lambda: (1, 0)
    )
    settlement = Settlement(
        _plan(max_attempts=attempts),
        SimpleNamespace(run=run),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        inbox,  # type: ignore[arg-type]
        SimpleNamespace(judge=judge, of=lambda _: blamed, pause=lambda _: 7.0),  # type: ignore[arg-type]
        counts,
        Types(()),
    )
    item = _item(per_transaction=1)
    item.message = message
    drive(settlement.fail(item, OutageError("away")))
    is_dead = policy == "dead_letter" or (policy == "retry" and attempts == 1)
    [received] = inbox.received
    assert (received["dead"], received["attempts"]) == (is_dead, int(policy != "outage"))
    assert received["pause"] == (7.0 if policy == "outage" else None)
    assert (counts.failures, counts.dead_letters, counts.received) == (1, int(is_dead), 1)
    assert bool(blamed.blamed) == (policy != "dead_letter")
