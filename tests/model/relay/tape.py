"""Record what a thread of a real relay asks and is answered, and play it to the core again.

The publishing thread is here, the settling thread in `settling_tape`.

Invariants:
- The tape has every call of the world in order, with its answer; the core that it is played to has nothing
  else.
- Recording ends before a call of the core, not within one, and nothing is recorded between two of them.
- If the core asks something else than it did, or in another order, it depends on something that no model
  controls, or a driver has done what the core does not expect: `DifferentError`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.delivery import Complete, Delivery
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.ledger import SettleRequest
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.transactions import TransactionalPublisher

_DRIVE = "drive"
_DRIVEN = "driven"
_ANSWER = "answer"
_RAISED = "raised"
_PROPERTY = "property"


class DifferentError(AssertionError):
    """The core asks for something else than it did before."""


class EndOfTapeError(BaseException):
    """The recorded relay was ended here by another of its threads."""


class Tape:
    """What was asked, with what, and the answers: recorded, then played.

    Args:
        limit: how many entries are recorded, about; None: all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.entries: list[tuple[str, Any, Any]] = []
        self.at = 0
        self.limit = limit
        self.difference: DifferentError | None = None
        """The first that was found."""
        self._thread: int | None = None

    def drive(self, name: str, given: Any, call: Callable[[], Any]) -> Any:
        """Note a call of the core by its driver; until it returns, what this thread asks is recorded."""
        if self._thread is not None or (self.limit is not None and len(self.entries) >= self.limit):
            return call()
        self.entries.append((_DRIVE, name, digest(given)))
        self._thread = threading.get_ident()
        try:
            answer = call()
        except BaseException as error:
            self.entries.append((_DRIVEN, name, type(error)))
            raise
        finally:
            self._thread = None
        self.entries.append((_DRIVEN, name, digest(answer)))
        return answer

    def play_drives(self, calls: Callable[[str, Any], Any]) -> None:
        """Make the recorded calls of the core again; compare what they return."""
        while self.at < len(self.entries):
            kind, name, given = self.peek()
            assert kind == _DRIVE
            self.at += 1
            raised: BaseException | None = None
            try:
                answer = digest(calls(name, given))
            except EndOfTapeError:
                return
            except DifferentError:
                raise
            except BaseException as error:  # noqa: BLE001 - compared
                raised, answer = error, type(error)
            if (ended := self.peek()) != (_DRIVEN, name, answer):
                raise DifferentError(f"entry {self.at}: {name} returns {answer}, and did {ended}") from raised
            self.at += 1

    def record(self, name: str, given: Any, ask: Callable[[], Any]) -> Any:
        """Ask, and note the answer."""
        if not self.is_recording:
            return ask()
        self.entries.append((name, digest(given), None))
        try:
            answer = ask()
        except BaseException as error:
            self.entries.append((_RAISED, name, error))
            raise
        # The core or another thread may change a container; what counts is what was seen of it now.
        seen = answer.copy() if isinstance(answer, dict | deque | list) else answer
        self.entries.append((_ANSWER, name, seen))
        return answer

    @property
    def is_recording(self) -> bool:
        """Whether this thread is within a call of the core that is recorded."""
        return self._thread == threading.get_ident()

    def note(self, name: str, given: Any) -> None:
        """Note a call of the core by what it has asked."""
        if self.is_recording:
            self.entries.append((name, given, None))

    def peek(self) -> tuple[str, Any, Any]:
        """What comes next."""
        if self.at == len(self.entries):
            raise EndOfTapeError
        return self.entries[self.at]

    def play(self, name: str, given: Any, between: Callable[[str, Any], Any] | None = None) -> Any:
        """Return the recorded answer to this call.

        Args:
            between: lets happen what the driver did with the core before it answered.
        """
        asked, was, _ = self.peek()
        self.at += 1
        if (asked, was) != (name, digest(given)):
            # The code may take it for an error of the world, and go on.
            self.difference = self.difference or DifferentError(
                f"entry {self.at}: asks {name} {digest(given)}, and asked {asked} {was}"
            )
            raise self.difference
        while True:
            kind, about, answer = self.peek()
            if kind in (_ANSWER, _RAISED):
                self.at += 1
                assert about == name
                if kind == _RAISED:
                    raise answer
                return answer
            if between is None:
                raise DifferentError(f"entry {self.at}: {kind} was asked within {name}")
            between(kind, about)


def digest(given: Any) -> Any:
    """What tells an argument from another one."""
    if isinstance(given, Event):
        return given.seq
    if isinstance(given, Batch | ReleasedBatch):
        return [type(given).__name__, *map(digest, given.events)]
    if isinstance(given, Delivery):
        return digest(given.batch)
    if isinstance(given, Complete):
        return [digest(given.batch), given.parked_states()]
    if isinstance(given, SettleRequest):
        return [given.position, given.tick_id, [dict(each) for each in given.parked]]
    if isinstance(given, dict):
        return {name: digest(each) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return [digest(each) for each in given]
    return type(given).__name__ if callable(given) else given


class Recorded:
    """A port with a real one behind it."""

    def __init__(self, tape: Tape, name: str, real: Any) -> None:
        self.__dict__.update(tape=tape, name=name, real=real)

    def __getattr__(self, attribute: str) -> Any:
        name, value = f"{self.name}.{attribute}", getattr(type(self.real), attribute, None)
        if callable(value) and not isinstance(value, property):
            return lambda *given, **named: self.call(name, attribute, given, named)
        return self.tape.record(name, _PROPERTY, lambda: getattr(self.real, attribute))

    def __setattr__(self, attribute: str, value: Any) -> None:
        self.tape.record(f"{self.name}.{attribute} =", value, lambda: setattr(self.real, attribute, value))

    def __call__(self, *given: Any) -> Any:
        return self.tape.record(self.name, [*given], lambda: self.real(*given))

    def call(self, name: str, attribute: str, given: Any, named: Any) -> Any:
        ask = getattr(self.real, attribute)
        return self.tape.record(name, [*given, *named.values()], lambda: ask(*given, **named))


class Played:
    """A port with a tape behind it."""

    def __init__(self, tape: Tape, name: str) -> None:
        self.__dict__.update(tape=tape, name=name)

    def __getattr__(self, attribute: str) -> Any:
        name = f"{self.name}.{attribute}"
        asked, given, _ = self.tape.peek()
        if (asked, given) == (name, _PROPERTY):
            return self.tape.play(name, _PROPERTY)
        return lambda *given, **named: self.call(name, given, named)

    def __setattr__(self, attribute: str, value: Any) -> None:
        self.tape.play(f"{self.name}.{attribute} =", value)

    def __call__(self, *given: Any) -> Any:
        return self.tape.play(self.name, [*given])

    def call(self, name: str, given: Any, named: Any) -> Any:
        return self.tape.play(name, [*given, *named.values()])


class RecordedProducer(Recorded):
    """Kafka's client: what it does with batches, and with the core while it sends, is noted too."""

    def call(self, name: str, attribute: str, given: Any, named: Any) -> Any:
        if not self.tape.is_recording:
            return super().call(name, attribute, given, named)
        publisher = self.publisher_of()
        passed = [RecordedGate(self.tape, each) if each is publisher else each for each in given]
        shown = [each for each in given if each is not publisher]

        def ask() -> Any:
            answer = getattr(self.real, attribute)(*passed, **named)
            return answer, [_progress(each) for each in publisher._deliveries]

        return self.tape.record(name, [*shown, *named.values()], ask)[0]

    def publisher_of(self) -> Publisher:
        found: Publisher = self.__dict__["publisher"]
        return found


class RecordedGate:
    """The core, as the client calls it while it sends."""

    def __init__(self, tape: Tape, core: Publisher) -> None:
        self._tape = tape
        self._core = core

    def __getattr__(self, attribute: str) -> Any:
        def call(*given: Any) -> Any:
            self._tape.note(f"gate.{attribute}", [digest(given[:1]), *given[1:]])
            return getattr(self._core, attribute)(*given)

        return call


class PlayedProducer(Played):
    """The same from a tape."""

    def call(self, name: str, given: Any, named: Any) -> Any:
        publisher: Publisher = self.__dict__["publisher"]
        shown = [each for each in given if each is not publisher]

        def between(asked: str, given: Any) -> None:
            self.tape.at += 1
            (about,), *rest = given
            # What is not about a delivery is about Kafka.
            [found] = [each for each in publisher._deliveries if digest(each) == about] or [about]
            getattr(publisher, asked.removeprefix("gate."))(found, *rest)

        answer, progress = self.tape.play(name, [*shown, *named.values()], between)
        for delivery, (acknowledged, failed, in_flight) in zip(publisher._deliveries, progress, strict=True):
            delivery.acknowledged, delivery.failed, delivery.in_flight = (
                acknowledged,
                list(failed),
                list(in_flight),
            )
        return answer


def _progress(delivery: Delivery) -> tuple[int, list[Any], list[Event]]:
    return delivery.acknowledged, list(delivery.failed), list(delivery.in_flight)


class _Flow(Flow):
    """The real one, whose steps are recorded."""

    def __init__(self, tape: Tape, *given: Any, **named: Any) -> None:
        self._tape = tape
        super().__init__(*given, **named)

    def step(self) -> bool:
        going: bool = self._tape.drive("step", None, super().step)
        return going


class Recording:
    """One relay's publishing thread, from its beginning to its end, or for `limit` entries."""

    def __init__(self, publisher: Publisher, *, until_empty: bool, limit: int | None = None) -> None:
        self.tape = Tape(limit)
        self.until_empty = until_empty
        # Open where the relay before has left it so.
        self.breaker = copy(publisher.breaker)
        self.begins_at: tuple[Position, str | None] | None = None

    def flow(self, publisher: Publisher, real: dict[str, Any], flags: dict[str, Any]) -> Flow:
        """Put the tape between the real relay and its ports."""
        tape = self.tape
        producer = RecordedProducer(tape, "producer", publisher._producer)
        producer.__dict__["publisher"] = publisher
        _rewire(
            publisher,
            producer,
            Recorded(tape, "blocked", publisher._blocked),
            Recorded(tape, "clock", publisher._clock),
        )
        if isinstance(publisher, TransactionalPublisher):
            publisher._new_id = Recorded(tape, "new_id", publisher._new_id)
        ports: dict[str, Any] = {name: Recorded(tape, name, each) for name, each in real.items()}
        return _Flow(tape, publisher, **ports, **flags)

    def play(self) -> None:
        """Have the core do it again."""
        tape = self.tape
        producer: Any = PlayedProducer(tape, "producer")
        blocked: Any = Played(tape, "blocked")
        clock = Played(tape, "clock")
        publisher: Any
        if self.begins_at is None:
            publisher = Publisher(producer, blocked, patience=0.0, clock=clock)
        else:
            ports: Any = {"patience": 0.0, "clock": clock, "new_id": Played(tape, "new_id")}
            publisher = TransactionalPublisher(producer, blocked, *self.begins_at, **ports)
        publisher.breaker = copy(self.breaker)
        producer.__dict__["publisher"] = publisher
        names = ("batches", "ledger", "blocked", "retries", "crash_guard", "clock", "is_stopped")
        played: dict[str, Any] = {name: Played(tape, name) for name in names}
        flow = Flow(
            publisher,
            **played,
            until_empty=self.until_empty,
            on_complete=lambda batches: None,
        )
        publisher.requests = flow
        tape.play_drives(lambda name, given: flow.step())


def _rewire(publisher: Any, producer: Any, blocked: Any, clock: Any) -> None:
    publisher._producer, publisher._blocked, publisher._clock = producer, blocked, clock
    if isinstance(publisher, TransactionalPublisher):
        publisher._transactions = producer
