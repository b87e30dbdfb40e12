"""Record what a real consumer asks PostgreSQL, Kafka's client, the clock and its handler, and is answered.

It is played to the consumer's code again.

Invariants:
- `Consumer`, `Work`, `Member` and what they use are the production code, both times; the second time
  they have nothing but the tape.
- Callbacks of Kafka's client come within the question in which they came.
- Recording ends before a question, not within one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, Final

import confluent_kafka

from outbox_pipelines.consumer import (
    Consumer,
    base_consumer,
    deliveries,
    handler_breakers,
    handler_transactions,
    inbox,
    membership,
    partition_owners,
    work,
)
from outbox_pipelines.consumer.consumer import drive
from outbox_pipelines.consumer.consumer_database import Statement
from tests.model.relay.tape import DifferentError, EndOfTapeError, Tape

_TIMED: Final = (base_consumer, handler_breakers, deliveries, handler_transactions, membership, work)
_LEAVING: Final = "outbox-leaving"
_LOST: Final = "outbox-lost-client"
_CALLBACK: Final = "callback"


class ConsumerTape(Tape):
    """A tape of one thread, and of the one in which it leaves its group."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._depth = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    @property
    def is_recording(self) -> bool:
        return self._thread is not None and (
            self._thread == threading.get_ident() or threading.current_thread().name == _LEAVING
        )

    def record(self, name: str, given: Any, ask: Callable[[], Any]) -> Any:
        if self._depth == 0 and self.limit is not None and len(self.entries) >= self.limit:
            self._thread = None
        if not self.is_recording:
            return ask()
        self._depth += 1
        try:
            return super().record(name, given, ask)
        finally:
            self._depth -= 1


class ConsumerRecording:
    """One consumer, from its beginning to its end, or for `limit` entries.

    Args:
        make: makes the consumer.
        effect: where the function is that its handlers call with a connection, and something to compare.
    """

    def __init__(
        self, make: Callable[[], Consumer], effect: tuple[Any, str], limit: int | None = None
    ) -> None:
        self.tape = ConsumerTape(limit)
        self.stop: threading.Event = _Stop(self.tape.record)
        """Ends `run`."""
        self._make = make
        self._effect = effect
        self._ended = ""

    def run(self) -> None:
        """Consume until it is stopped, by a signal too, and record that."""
        tape, consumer, clients = self.tape, self._make(), _Numbers()
        module, name = self._effect
        make, effect = consumer._database, getattr(module, name)

        def ask(about: str, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: tape.record(about, [*given], lambda: call(*given))

        consumer._database = lambda: _RecordedDatabase(tape, make)  # type: ignore[method-assign]
        world = {
            (module, name): lambda connection, *given: tape.record(
                "effect", [*given], lambda: effect(connection, *given)
            ),
            (membership, "confluent_kafka"): SimpleNamespace(
                Consumer=lambda settings, logger: _RecordedClient(tape, clients.next(), settings, logger)
            ),
        }
        try:
            with _world(world, ask), tape.recording():
                consumer.run(self.stop)
        except BaseException as error:
            self._ended = type(error).__name__
            raise

    def play(self) -> int:
        """Have the consumer do it again; return the number of entries.

        Raises:
            DifferentError: it does something else.
        """
        tape, consumer, clients = self.tape, self._make(), _Numbers()

        def ask(about: str, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: tape.play(about, [*given])

        consumer._database = lambda: _PlayedDatabase(tape)  # type: ignore[method-assign]
        thread = threading.get_ident()

        def is_stopped(name: str, given: Any, real: Callable[[], bool]) -> bool:
            # Another thread watches how long a stop takes.
            stopped: bool = tape.play(name, given) if threading.get_ident() == thread else real()
            return stopped

        world = {
            self._effect: lambda connection, *given: tape.play("effect", [*given]),
            (membership, "confluent_kafka"): SimpleNamespace(
                Consumer=lambda settings, logger: _PlayedClient(tape, clients.next(), settings)
            ),
        }
        logging.disable()
        try:
            with _world(world, ask):
                consumer.run(_Stop(is_stopped))
        except EndOfTapeError:
            return tape.at
        except DifferentError:
            raise
        except BaseException as error:
            if tape.difference is not None:
                raise tape.difference from error
            if type(error).__name__ != self._ended:
                raise DifferentError(f"entry {tape.at}: the consumer ends with {error!r}") from error
        finally:
            logging.disable(logging.NOTSET)
        if tape.at < len(tape.entries):
            raise DifferentError(f"entry {tape.at}: the consumer ends, and asked {tape.entries[tape.at]}")
        return tape.at


class _Numbers:
    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class _Stop(threading.Event):
    def __init__(self, ask: Callable[[str, Any, Callable[[], bool]], bool]) -> None:
        super().__init__()
        self._ask = ask

    def is_set(self) -> bool:
        return self._ask("is stopped", None, super().is_set)


@contextmanager
def _world(
    ports: Mapping[tuple[Any, str], Any], ask: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put the tape where modules have a clock, chance, Kafka's client and the handlers' effects."""
    clock = SimpleNamespace(monotonic=ask("clock", time.monotonic), sleep=ask("sleep", time.sleep))
    places = {
        **ports,
        **{(module, "time"): clock for module in _TIMED},
        (partition_owners, "uuid"): SimpleNamespace(uuid4=ask("uuid", uuid.uuid4)),
        (inbox, "random"): SimpleNamespace(random=ask("random", random.random)),
    }
    before = [getattr(module, name) for module, name in places]
    for (module, name), ours in places.items():
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


class _RecordedDatabase:
    def __init__(self, tape: Tape, make: Callable[[], Any]) -> None:
        self._tape = tape
        self._real: Any = None
        tape.record("connect", None, lambda: self._connect(make))

    def _connect(self, make: Callable[[], Any]) -> None:
        self._real = make()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        context = self._real.transaction()
        connections: list[Any] = []
        self._tape.record("begin", None, lambda: connections.append(drive(context.__aenter__())))
        try:
            yield connections[0]
        except BaseException as error:
            given = type(error), error, error.__traceback__
            self._tape.record("end", type(error).__name__, lambda: drive(context.__aexit__(*given)))
            raise
        self._tape.record("end", None, lambda: drive(context.__aexit__(None, None, None)))

    async def rows(self, transaction: Any, query: str, given: Mapping[str, Any]) -> Any:
        return self._tape.record(
            "rows", [query, given], lambda: drive(self._real.rows(transaction, query, given))
        )

    @property
    def warnings(self) -> int:
        return int(self._tape.record("warnings", None, lambda: self._real.warnings))

    async def require_open(self, transaction: Any) -> None:
        self._tape.record("require open", None, lambda: drive(self._real.require_open(transaction)))

    async def end_handling(self, transaction: Any, following: Statement | None = None) -> Any:
        return self._tape.record(
            "end_handling",
            following and [*following],
            lambda: drive(self._real.end_handling(transaction, following)),
        )

    def abort(self) -> None:
        """From another thread: what comes of it is an answer."""
        self._real.abort()

    async def close(self) -> None:
        self._tape.record("close", None, lambda: drive(self._real.close()))


class _PlayedDatabase:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        tape.play("connect", None)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        self._tape.play("begin", None)
        try:
            yield
        except (EndOfTapeError, DifferentError):
            raise
        except BaseException as error:
            self._tape.play("end", type(error).__name__)
            raise
        self._tape.play("end", None)

    async def rows(self, transaction: None, query: str, given: Mapping[str, Any]) -> Any:
        return self._tape.play("rows", [query, given])

    @property
    def warnings(self) -> int:
        return int(self._tape.play("warnings", None))

    async def require_open(self, transaction: None) -> None:
        self._tape.play("require open", None)

    async def end_handling(self, transaction: None, following: Statement | None = None) -> Any:
        return self._tape.play("end_handling", following and [*following])

    def abort(self) -> None:
        """Nothing waits here."""

    async def close(self) -> None:
        self._tape.play("close", None)


class _RecordedClient:
    """Kafka's client; its callbacks are noted where they come."""

    def __init__(self, tape: Tape, number: int, settings: Mapping[str, Any], logger: Any) -> None:
        self._tape, self._number = tape, number
        self._callbacks: dict[str, Callable[..., Any]] = {}
        ours = {name: self._noted(name, each) for name, each in settings.items() if callable(each)}
        self._real = confluent_kafka.Consumer({**settings, **ours}, logger=logger)

    def _noted(self, name: str, call: Callable[..., Any], *, of_group: bool = False) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            given = (self, *given[1:]) if of_group else given
            self._tape.note(f"{_CALLBACK} {self._number} {name}", given[of_group:])
            return call(*given)

        return called

    def subscribe(self, topics: Any, **callbacks: Any) -> None:
        ours = {name: self._noted(name, each, of_group=True) for name, each in callbacks.items()}
        self._ask("subscribe", (topics,), {}, lambda: self._real.subscribe(topics, **ours))

    def __getattr__(self, attribute: str) -> Any:
        call = getattr(self._real, attribute)
        return lambda *given, **named: self._ask(attribute, given, named, lambda: call(*given, **named))

    def _ask(self, attribute: str, given: Any, named: Any, ask: Callable[[], Any]) -> Any:
        return self._tape.record(f"client {self._number}.{attribute}", [*given, *named.values()], ask)


class _PlayedClient:
    def __init__(self, tape: Tape, number: int, settings: Mapping[str, Any]) -> None:
        self._tape, self._number = tape, number
        self._callbacks = {name: each for name, each in settings.items() if callable(each)}

    def subscribe(self, topics: Any, **callbacks: Any) -> None:
        for name, each in callbacks.items():
            self._callbacks[name] = lambda *given, each=each: each(self, *given)
        self._ask("subscribe", topics)

    def __getattr__(self, attribute: str) -> Any:
        if threading.current_thread().name == _LOST:
            # It is not recorded when a lost client ends.
            return lambda: None
        return lambda *given, **named: self._ask(attribute, *given, *named.values())

    def _ask(self, attribute: str, *given: Any) -> Any:
        return self._tape.play(f"client {self._number}.{attribute}", [*given], self._call_back)

    def _call_back(self, asked: str, given: Any) -> None:
        self._tape.at += 1
        name = asked.removeprefix(f"{_CALLBACK} {self._number} ")
        self._callbacks[name](*given)
