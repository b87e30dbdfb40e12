"""The production code of one consumer process as a state machine, which asks the world and gets answers.

`Consumer`, `Work` and its parts, `Inbox`, `Reader` and `Member` are the real ones. The database, Kafka's
client, the clock and the handler are replaced.

Invariants:
- Between two questions the code depends on nothing but its state and the answers: the same answers lead to
  the same question. So the code runs once for each list of answers, and its result is remembered.
- At the top of the loop the state is `Top`, all of it; answers before that no longer count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from uuid import UUID

import confluent_kafka
import psycopg

from outbox_pipelines.consumer import (
    Consumer,
    OutageError,
    deliveries,
    handler_breakers,
    handler_transactions,
    membership,
    work,
)
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.consumer import drive
from outbox_pipelines.consumer.consumer_database import Statement
from outbox_pipelines.consumer.errors import StoppedError
from outbox_pipelines.consumer.handler_breakers import Breaker
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.work import Work

Request = tuple[Any, ...]
TOP: Final = ("top",)
ENDED: Final = ("ended",)
TOPIC: Final = "events"
KINDS: Final = ("works", "refused", "kills", "needs")
_NOW: Final = 0.5
_LATER: Final = 1.0
_MUCH_LATER: Final = 1_000.0
_SENT: Final = datetime(2026, 1, 1, tzinfo=UTC)
# Committed together with the statement, in one step: nothing can be seen in between but that a row is locked.
AT_ONCE: Final = frozenset(("CLAIM", "MISSED", "TAKE_BACK", "HURRY", "OWN_FREE", "OWN", "DISOWN"))
READS: Final = frozenset(("KNOWN", "TAKEN", "HEADS", "NEXT", "READ"))
# What they return does not depend on other processes here.
_SURE: Final[dict[str, list[tuple[Any, ...]]]] = {
    "END_HANDLING": [(True,)],
    "IS_RECORDED": [(False,)],
    "IS_SETTLED": [(False,)],
}
_NAMES: Final = {
    getattr(queries, name): name
    for name in (
        *("RECORD", "RECORD_MANY", "RECEIVE", "FINISH", "SPOILT"),
        *_SURE,
        *AT_ONCE,
        *READS,
    )
}
_LOGGERS: Final = [
    logging.getLogger(f"outbox_pipelines.consumer.{name}")
    for name in (
        *("base_consumer", "database_retry", "deliveries", "handler_breakers", "membership"),
        *("partition_owners", "settlement"),
    )
]


@dataclass(frozen=True)
class Setting:
    """What a consumer is made with, and the events that it meets.

    Args:
        kinds: of each event, by its number: works, refused (always fails), kills (the process), needs (a
            service), or another one, which has no handler.
        keys: of each event: those of one key are of one aggregate.
        mode: run, receive or drain.
    """

    kinds: tuple[str, ...]
    keys: tuple[str, ...]
    batch: int = 1
    per_transaction: int = 1
    polled: int = 1
    """How many messages a poll returns at most whose handlers are called one by one."""
    attempts: int = 2
    blocks: bool = False
    cache: bool = False
    outage_after: int = 0
    mode: str = "run"


class Top(NamedTuple):
    """All that a process remembers at the top of its loop."""

    looks: bool = True
    """Whether it is time to look at the inbox; otherwise it is later."""
    commits: bool = True
    """Whether it is time to commit offsets; otherwise it is later."""
    breaker: tuple[bool, tuple[tuple[int, int | None], ...], tuple[type[BaseException], ...]] | None = None
    owned: tuple[int, ...] = ()
    suspect: tuple[tuple[int, int], ...] = ()
    gone: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    assigned: tuple[int, ...] = ()
    begun: tuple[Request, Any] | None = None
    """The record that the open transaction began with, behind the last commit, and its answer."""
    stored: tuple[tuple[int, int], ...] = ()
    has_stored: bool = False
    paused: tuple[int, ...] = ()


class PauseError(BaseException):
    """The code has asked for something that has no answer yet."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request = request


class DiedError(BaseException):
    """The code has raised what it must not raise."""


def message_id(number: int) -> UUID:
    """Return the id of an event: version 7, in their order."""
    return UUID(int=(0x019A << 112) | (7 << 76) | (2 << 62) | number)


def number(event_id: UUID | str) -> int:
    """Return which event has an id."""
    return UUID(str(event_id)).int & 0xFFFF


class Message:
    """A message as Kafka's client gives it."""

    def __init__(self, setting: Setting, nth: int, partition: int, offset: int) -> None:
        self._nth, self._partition, self._offset = nth, partition, offset
        self._key = setting.keys[nth].encode()
        self._headers = _headers(setting, nth)

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes:
        return b"{}"

    def headers(self) -> list[tuple[str, bytes]]:
        return [(name, text.encode()) for name, text in self._headers]

    def timestamp(self) -> tuple[int, int]:
        return 1, round(_SENT.timestamp() * 1000)

    def error(self) -> None:
        return None


def _headers(setting: Setting, nth: int) -> list[tuple[str, str]]:
    return [("id", str(message_id(nth))), ("event-type", setting.kinds[nth]), ("aggregate-type", "it")]


class Transaction:
    """What a handler gets: its effects are committed with it."""

    def __init__(self) -> None:
        self.effects: list[int] = []
        self.writes = False


@dataclass
class Run:
    """One run of the code, from the top of the loop, with answers as far as there are any."""

    setting: Setting
    top: Top
    answers: Sequence[tuple[bool, Any]]
    at: int = 0
    is_stopped: bool = False
    now: float = _NOW
    client: Any = None
    begun: tuple[Request, Any] | None = None
    answer: tuple[Request, Any] | None = None
    """As in `Connections`."""
    objects: dict[type, Any] = field(default_factory=dict)
    """What was made of the production code."""

    def ask(self, *request: Any) -> Any:
        """Return the world's answer; PauseError where there is none yet."""
        if self.at >= len(self.answers):
            raise PauseError(request)
        self.is_stopped, answer = self.answers[self.at]
        self.at += 1
        return answer

    def monotonic(self) -> float:
        return self.now

    # As `DatabaseRetry` begins: all commits are durable.
    warnings = -1

    # The database.

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        transaction = Transaction()
        self.answer, self.begun = self.begun, None
        transaction.writes = self.answer is not None
        try:
            yield transaction
        except Exception:
            if transaction.writes:
                self.ask("rollback")
            raise
        if transaction.writes:
            _or_raise(self.ask("commit", tuple(transaction.effects)))

    async def rows(
        self, transaction: Transaction, query: str, given: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        name = _NAMES[query]
        if name in _SURE:
            return _SURE[name]
        if self.answer is not None:
            (request, answer), self.answer = self.answer, None
            if request == (name, *_request(name, given)):
                return self._rows(name, answer, given)
            self.ask("rollback")
            transaction.writes = False
        try:
            answer = _or_raise(self.ask(name, *_request(name, given)))
        except psycopg.Error:
            # Nothing is left to roll back.
            transaction.writes = False
            raise
        transaction.writes = name not in AT_ONCE and (transaction.writes or name not in READS)
        return self._rows(name, answer, given)

    async def require_open(self, transaction: Transaction) -> None: ...

    async def end_handling(self, transaction: Transaction, following: Statement | None = None) -> bool:
        if following is None:
            return True
        query, given = following
        request = _NAMES[query], *_request(_NAMES[query], given)
        transaction.writes = False
        _or_raise(self.ask("commit", tuple(transaction.effects)))
        # What is wrong with it is seen when it is asked again.
        with contextlib.suppress(psycopg.Error):
            self.begun = request, _or_raise(self.ask(*request))
        return True

    def abort(self) -> None:
        """Nothing waits for an answer of a database."""

    async def close(self) -> None: ...

    def _rows(self, name: str, answer: Any, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        if name in ("RECORD", "FINISH"):
            return [("a transaction",)] if answer else []
        if name == "RECORD_MANY":
            ids = [str(message_id(each)) for each in answer]
            return [(len(ids), "a transaction", ids if len(ids) < len(_texts(given["ids"])) else None)]
        if name == "RECEIVE":
            return [(seq, str(message_id(each))) for seq, each in answer]
        if name == "KNOWN":
            return [(str(message_id(each)),) for each in answer]
        if name == "TAKEN":
            return [(answer,)]
        if name in ("HEADS", "NEXT"):
            return [(seq, begun, self.setting.kinds[nth]) for seq, begun, nth in answer]
        if name == "CLAIM":
            return [(*self._stored(answer), str(message_id(answer)))] if answer is not None else []
        if name == "READ":
            return [("an error", *self._stored(answer))] if answer is not None else []
        if name == "OWN_FREE":
            return [(TOPIC, *each) for each in answer]
        return []

    def _stored(self, nth: int) -> tuple[Any, ...]:
        headers = json.dumps(_headers(self.setting, nth))
        return TOPIC, 0, nth, self.setting.keys[nth].encode(), b"{}", headers, _SENT

    # The consumer's plan.

    async def pause(self, seconds: float) -> None:
        self._wait("pause")

    async def stay(self) -> None:
        self._wait("stay")

    def _wait(self, name: str) -> None:
        if self.setting.mode == "drain":
            self.ask(name)
        else:
            self.client.waits = name
            self.member.wait(0)
            self.client.waits = ""

    # The handler.

    def handle(self, given: Any, transaction: Transaction) -> None:
        for event in given if self.setting.batch > 1 else [given]:
            if event.type == "refused":
                raise ValueError("refused")
            if event.type == "kills":
                self.ask("kill")
            if event.type == "needs" and not self.ask("service"):
                raise OutageError("the service")
            transaction.effects.append(number(event.id))
            transaction.writes = True

    # One step of its loop.

    def execute(self) -> Top | None:
        """Run from the top to the top; None: the process has ended."""
        is_stopped, is_late = self.answers[0]
        self.at, self.is_stopped = 1, is_stopped
        self.now = _MUCH_LATER if is_late else _NOW
        consumer = _consumer(self)
        plan = consumer._plan(
            limit=contextlib.nullcontext,
            pause=self.pause,
            is_stopped=lambda: self.is_stopped,
            stay=self.stay,
        )
        self.client = Client(self)
        self.member = member = Member(consumer._kafka, consumer._topics)
        worker = Work(plan, consumer, consumer._reader, self)
        self.objects = {
            type(each): each
            for each in (
                *(worker, worker.retry, worker.guard, worker.breakers, worker.transactions),
                *(worker.settlement, worker.inbox, worker._deliveries, worker._processed, worker._items),
                *(member,),
            )
        }
        _restore(self.top, worker, member, self.client, consumer)
        self.begun = self.top.begun
        worker._polled.events = self.setting.polled
        try:
            if is_stopped:
                drive(worker.end())
                if self.setting.mode != "drain":
                    member.close()
                return None
            if self.setting.mode == "drain":
                drive(worker.inbox.look(every=0))
            else:
                step = consumer._handle if self.setting.mode == "run" else consumer._receive
                drive(step(worker, member))
        except StoppedError:
            if self.setting.mode != "drain":
                member.close()
            return None
        except Exception as error:
            raise DiedError(f"{type(error).__name__}: {error}") from error
        return _saved(self, worker, member)


class Client:
    """Kafka's client, as far as `Member` uses it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.assigned: set[int] = set()
        self.stored: dict[int, int] = {}
        self.paused: set[int] = set()
        self.waits = ""
        """Why it is polled for no messages."""
        self._commits: dict[int, int] = {}
        self._here: list[Message] = []
        self._callbacks: dict[str, Any] = {}

    def subscribe(self, topics: Sequence[str], **callbacks: Any) -> None:
        self._callbacks = callbacks

    def poll(self, seconds: float) -> Message | None:
        if self.waits:
            self.serve(self._run.ask(self.waits))
            return None
        callbacks, messages = self._run.ask("poll", self._committing())
        self.serve(callbacks)
        self._here = [Message(self._run.setting, *each) for each in messages]
        return self._here.pop(0) if self._here else None

    def consume(self, number: int, seconds: float) -> list[Message]:
        taken, self._here = self._here[:number], self._here[number:]
        return taken

    def serve(self, callbacks: Sequence[tuple[str, int]]) -> None:
        for kind, partition in callbacks:
            places = [confluent_kafka.TopicPartition(TOPIC, partition)]
            if kind == "assign":
                self.assigned.add(partition)
                self._callbacks["on_assign"](self, places)
                continue
            self._callbacks["on_revoke" if kind == "revoke" else "on_lost"](self, places)
            commits = self._committing() if kind == "revoke" else ()
            self.assigned.discard(partition)
            self.stored.pop(partition, None)
            if kind == "revoke":
                self._run.ask("release", partition, commits)

    def store_offsets(self, *, message: Message) -> None:
        if message.partition() not in self.assigned:
            raise confluent_kafka.KafkaException(
                confluent_kafka.KafkaError(confluent_kafka.KafkaError._STATE)
            )
        self.stored[message.partition()] = message.offset() + 1

    def commit(self, *, asynchronous: bool) -> list[Any]:
        # With the next question: before that, no process can know.
        self._commits.update(self.stored)
        self.stored.clear()
        return []

    def close(self) -> None:
        self._run.ask("leave", self._committing())

    def _committing(self) -> tuple[tuple[int, int], ...]:
        commits, self._commits = tuple(sorted(self._commits.items())), {}
        return commits

    def pause(self, partitions: Sequence[confluent_kafka.TopicPartition]) -> None:
        # A partition stays so when it goes, and is so when it comes back: observed with librdkafka 2.
        self.paused.update(each.partition for each in partitions)

    def resume(self, partitions: Sequence[confluent_kafka.TopicPartition]) -> None:
        self.paused.difference_update(each.partition for each in partitions)

    def assignment(self) -> list[confluent_kafka.TopicPartition]:
        return [confluent_kafka.TopicPartition(TOPIC, each) for each in sorted(self.assigned)]

    def position(self, partitions: Any) -> list[Any]:
        return []

    def list_topics(self, topic: str, timeout: float) -> None:
        """It always finds a broker."""


class Liar:
    """A cache that claims to know everything."""

    def known(self, source: str, ids: Sequence[UUID]) -> set[UUID]:
        return set(ids)

    def remember(self, source: str, ids: Sequence[UUID]) -> None: ...


_CONSUMERS: Final[dict[Setting, Consumer]] = {}


def _consumer(run: Run) -> Consumer:
    """The consumer of a setting, made once; its handler is that of the run."""
    setting = run.setting
    if (consumer := _CONSUMERS.get(setting)) is None:
        consumer = _CONSUMERS[setting] = Consumer(
            source="model",
            topics=[TOPIC],
            kafka={"bootstrap.servers": "nowhere:1"},
            connect=lambda: None,  # type: ignore[arg-type, return-value]
            max_attempts=setting.attempts,
            on_dead_letter="block" if setting.blocks else "continue",
            cache=Liar() if setting.cache else None,
            outage_after=setting.outage_after,
        )
        batch = setting.batch if setting.batch > 1 else None
        consumer.on(*KINDS, batch=batch, per_transaction=setting.per_transaction)(_handle)
    return consumer


def _handle(given: Any, transaction: Any) -> None:
    _current[0].handle(given, transaction)


_current: Final[list[Run]] = []


def _restore(top: Top, worker: Work, member: Member, client: Client, consumer: Consumer) -> None:
    worker.inbox.look_at = 0.0 if top.looks else _LATER
    worker.guard._owned = {(TOPIC, each) for each in top.owned}
    worker.guard._suspect = {(TOPIC, each): count for each, count in top.suspect}
    if top.breaker is not None:
        given = consumer._plan.keywords
        breaker = Breaker(given["outage_after"], given["max_attempts"])
        breaker.is_open, blamed, errors = top.breaker
        # No error of the model says that a service cannot be reached: its other attributes do not matter.
        breaker.errors = set(errors)
        breaker.blamed = {message_id(nth): seq for nth, seq in blamed}
        breaker._try_at = _LATER
        handler = consumer.handler(KINDS[0])
        worker.breakers._of = {id(handler): breaker}
    member._commit_at = 0.0 if top.commits else _LATER
    member._stored = top.has_stored
    member._gone = {(TOPIC, each) for each in top.gone}
    member._new = {(TOPIC, each) for each in top.new}
    member._left = {(TOPIC, each) for each in top.left}
    client.assigned = set(top.assigned)
    client.stored = dict(top.stored)
    client.paused = set(top.paused)


def _saved(run: Run, worker: Work, member: Member) -> Top:
    breaker = None
    for each in worker.breakers._of.values():
        blamed = tuple((number(event_id), seq) for event_id, seq in each.blamed.items())
        errors = tuple(sorted(each.errors, key=lambda it: it.__name__))
        breaker = (each.is_open, blamed, errors) if each.is_open or blamed else None
    return Top(
        looks=worker.inbox.look_at <= run.now,
        commits=member._commit_at <= run.now,
        breaker=breaker,
        owned=_partitions(worker.guard._owned),
        suspect=tuple(sorted((each, count) for (_, each), count in worker.guard._suspect.items())),
        gone=_partitions(member._gone),
        new=_partitions(member._new),
        left=_partitions(member._left),
        assigned=tuple(sorted(run.client.assigned)),
        stored=tuple(sorted(run.client.stored.items())),
        has_stored=member._stored,
        paused=tuple(sorted(run.client.paused)),
        begun=run.begun,
    )


def _partitions(places: set[tuple[str, int]]) -> tuple[int, ...]:
    return tuple(sorted(partition for _, partition in places))


def _or_raise(answer: Any) -> Any:
    if answer == "lost":
        raise psycopg.OperationalError("the connection is lost")
    if answer == "victim":
        raise psycopg.errors.DeadlockDetected("another transaction was chosen")
    return answer


def _texts(array: str) -> list[str]:
    """The texts of an array of PostgreSQL that needs no escapes."""
    return array[2:-2].split('","')


def _request(name: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A statement's parameters, without what the model does not look at."""
    if name == "RECORD":
        return (number(given["id"]),)
    if name == "RECORD_MANY":
        return (tuple(number(each) for each in _texts(given["ids"])),)
    if name == "KNOWN":
        return (tuple(number(each) for each in given["ids"]),)
    if name == "TAKEN":
        return (tuple(_texts(given["keys"])),)
    if name == "RECEIVE":
        return tuple(number(each) for each in given["ids"]), given["state"], given["attempts"]
    if name == "HEADS":
        return (tuple(given["held"]),)
    if name in ("CLAIM", "READ", "FINISH"):
        return given["seq"], given["attempts"]
    if name == "MISSED":
        return given["seq"], given["attempts"], given["state"], given["back"]
    if name in ("TAKE_BACK", "HURRY"):
        return (tuple(given["seqs"]),)
    if name == "OWN_FREE":
        return tuple(given["partitions"]), given["crashes"]
    if name in ("OWN", "DISOWN"):
        return (tuple(given["partitions"]),)
    return (given["seq"],)


@contextmanager
def _surroundings(run: Run) -> Iterator[None]:
    """The clock and Kafka's client are the model's, and nothing is logged."""
    clock = SimpleNamespace(monotonic=run.monotonic, sleep=None)
    kafka = SimpleNamespace(Consumer=lambda settings, logger: run.client)
    timed = (handler_breakers, deliveries, handler_transactions, membership, work)
    places = [
        *((module, "time") for module in timed),
        (membership, "confluent_kafka"),
    ]
    ours = {"time": clock, "confluent_kafka": kafka}
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, ours[name])
    for each in _LOGGERS:
        each.disabled = True
    _current.append(run)
    try:
        yield
    finally:
        _current.pop()
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
        for each in _LOGGERS:
            each.disabled = False


class Program:
    """All runs of one setting so far: states are numbers, and so are moves from one to the next."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._tops: dict[Top, int] = {}
        # Of each state: the top it came from, the answers since, and what is asked for.
        self._of: list[tuple[Top, tuple[tuple[bool, Any], ...], Request]] = []
        self._moves: dict[tuple[int, bool, Any], int] = {}
        self._lock = threading.Lock()
        self.begin = self._top(Top())
        self.runs = 0

    def request(self, state: int) -> Request:
        """Return what a state waits for."""
        return self._of[state][2]

    def top(self, state: int) -> Top:
        """Return what it remembered at the last top."""
        return self._of[state][0]

    def move(self, state: int, is_stopped: bool, answer: Any) -> int:
        """Return the state behind an answer."""
        key = (state, is_stopped, answer)
        if (found := self._moves.get(key)) is None:
            found = self._moves[key] = self._moved(state, (is_stopped, answer))
        return found

    def _moved(self, state: int, answer: tuple[bool, Any]) -> int:
        top, answers, _ = self._of[state]
        run = Run(self._setting, top, (*answers, answer))
        self.runs += 1
        with _surroundings(run):
            try:
                end = run.execute()
            except PauseError as pause:
                return self._new(top, run.answers, pause.request)
            except DiedError as crashed:
                return self._new(top, run.answers, ("crashed", str(crashed)))
        if end is None:
            return self._new(top, run.answers, ENDED)
        return self._top(end)

    def _top(self, top: Top) -> int:
        if (found := self._tops.get(top)) is None:
            found = self._tops[top] = self._new(top, (), TOP)
        return found

    def _new(self, top: Top, answers: Sequence[tuple[bool, Any]], request: Request) -> int:
        self._of.append((top, tuple(answers), request))
        return len(self._of) - 1


PROGRAMS: Final[dict[Setting, Program]] = {}
"""Of this process of Python; emptied where the production code is changed."""


def program(setting: Setting) -> Program:
    """Return the program of a setting."""
    if (found := PROGRAMS.get(setting)) is None:
        found = PROGRAMS[setting] = Program(setting)
    return found
