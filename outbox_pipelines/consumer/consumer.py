"""The consumer: each event's handler runs once, in one transaction with the note that it ran.

Invariants:
- The event is recorded first, then handled; then the database commits; only then may the offset be committed.
- One thread, one event at a time: a partition's events are handled in its order, and whoever has given a
  partition up handles nothing of it afterwards.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from outbox_pipelines.consumer import transactions
from outbox_pipelines.consumer.errors import HandlingError, UnreadableError
from outbox_pipelines.consumer.event import Event
from outbox_pipelines.consumer.membership import Member, settings
from outbox_pipelines.consumer.reading import Reader
from outbox_pipelines.consumer.transactions import Connections, Sessions, Transactions
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from confluent_kafka import Message
    from sqlalchemy.orm import Session

_LOG: Final = logging.getLogger(__name__)
Handler = Callable[[Event, Any], object]
_Handler = TypeVar("_Handler", bound=Handler)


@dataclass(slots=True)
class Counts:
    """What became of the events of a run."""

    handled: int = 0
    duplicates: int = 0
    """Handled before, by this source."""
    ignored: int = 0
    """Of types that nobody asked for."""


class Consumer:
    """Reads topics as a member of a group, and gives each event to the handler of its type.

    Args:
        source: who consumes. Events are told apart from those handled before within one source; two with
            different sources handle the same events each for itself.
        topics: their names; one that begins with ^ is a regular expression.
        kafka: settings of librdkafka, `bootstrap.servers` at least; `group.id` is the source by default.
        dsn: the database of the handlers' tables, as libpq takes it.
        connect: in place of `dsn`, gives a connection of psycopg without an open transaction.
        session: in place of both, a sessionmaker of SQLAlchemy: handlers then get a session.
        header_names: headers that have another name, as `{"id": "event-id"}`; see OUTBOX_HEADER_NAMES.

    Raises:
        SetupError: the arguments do not fit.
    """

    def __init__(
        self,
        *,
        source: str,
        topics: Sequence[str],
        kafka: Mapping[str, Any],
        dsn: str | None = None,
        connect: Callable[[], psycopg.Connection[Any]] | None = None,
        session: Callable[[], Session] | None = None,
        header_names: Mapping[str, str] | None = None,
    ) -> None:
        if not source:
            raise SetupError("source is empty: name who consumes, for example billing")
        if isinstance(topics, str) or not topics:
            raise SetupError('topics is no list of names: write for example ["order-events"]')
        if sum(way is not None for way in (dsn, connect, session)) != 1:
            raise SetupError("give one of dsn, connect and session: the database of the handlers' tables")
        self._source = source
        self._topics = topics
        self._kafka = settings(kafka, source)
        self._reader = Reader(header_names or {})
        self._connect = connect if dsn is None else transactions.dsn(dsn, source)
        self._session = session
        self._handlers: dict[str, Handler] = {}
        self._other: Handler | None = None

    def on(self, *types: str) -> Callable[[_Handler], _Handler]:
        """Decorates the handler of these event types: a function of the event and the connection or session.

        What it does there is committed together with the record of the event, or not at all. It neither
        commits nor rolls back; an exception of it ends `run`.

        Raises:
            SetupError: a type has a handler already, or the function is asynchronous.
        """
        if not types or callable(types[0]):
            raise SetupError('name the types of events: @consumer.on("order.placed")')

        def register(handler: _Handler) -> _Handler:
            _require_synchronous(handler)
            if taken := self._handlers.keys() & set(types):
                raise SetupError(f"{min(taken)} has a handler already: keep one")
            self._handlers.update(dict.fromkeys(types, handler))
            return handler

        return register

    def on_other(self, handler: _Handler) -> _Handler:
        """Decorates the handler of all other types. Without one their events are passed over, and counted.

        Raises:
            SetupError: there is one already, or the function is asynchronous.
        """
        _require_synchronous(handler)
        if self._other is not None:
            raise SetupError("on_other has a handler already: keep one")
        self._other = handler
        return handler

    def run(self, stop: threading.Event | None = None) -> Counts:
        """Handles events until SIGTERM or SIGINT, or until `stop` is set; what is at hand is finished first.

        Signals are watched for in the main thread alone; a second one has its usual effect.

        Returns:
            What became of the events.

        Raises:
            HandlingError: a handler or the database failed; nothing of that event was kept.
            UnreadableError: a message is no event.
            ConsumerError: Kafka's client cannot go on.
            SetupError: Kafka denies access or refuses the settings.
            psycopg.OperationalError: no entry to the database.
        """
        stop = threading.Event() if stop is None else stop
        counts = Counts()
        with (
            _signals_set(stop),
            closing(self._database()) as database,
            closing(Member(self._kafka, self._topics)) as member,
        ):
            while not stop.is_set():
                message = member.poll()
                if message is not None:
                    self._take(message, database, counts)
                    member.done(message)
        _LOG.info("consumer %s stopped: %s", self._source, counts)
        return counts

    def _database(self) -> Transactions:
        if self._session is not None:
            return Sessions(self._session)
        assert self._connect is not None
        return Connections(self._connect)

    def _take(self, message: Message, database: Transactions, counts: Counts) -> None:
        event = self._reader.read(message)
        handler = self._handlers.get(event.type, self._other)
        if handler is None and not event.type:
            raise UnreadableError(f"{event} names no type: handle it with on_other, or send event-type")
        if handler is None:
            counts.ignored += 1
            return
        try:
            with database.transaction() as transaction:
                is_new = database.record(transaction, event.uuid, self._source)
                if is_new:
                    handler(event, transaction)
        except SetupError:
            raise
        except Exception as error:
            raise HandlingError(f"{event} was not handled: {type(error).__name__}: {error}") from error
        if is_new:
            counts.handled += 1
        else:
            counts.duplicates += 1


def _require_synchronous(handler: Handler) -> None:
    if inspect.iscoroutinefunction(handler):
        raise SetupError(f"{handler.__name__} is asynchronous and would never run: write it without async")


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
