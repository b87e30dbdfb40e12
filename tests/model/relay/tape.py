"""Record what a real relay's publishing thread asks and is answered, and play it to the core again.

Invariants:
- The tape has every call of the world in order, with its answer; the core that it is played to has nothing
  else.
- If the core asks something else than it did, or in another order, it depends on something that no model
  controls, or a driver has done what the core does not expect: `DifferentError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from outbox_pipelines.event import Event
from outbox_pipelines.position import Position
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.delivery import Complete, Delivery
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.ledger import Order
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.transactions import TransactionalPublisher

_ANSWER = "answer"
_RAISED = "raised"
_PROPERTY = "property"


class DifferentError(AssertionError):
    """The core asks for something else than it did before."""


class EndOfTapeError(Exception):
    """The recorded relay was ended here by another of its threads."""


class Tape:
    """What was asked, with what, and the answers: recorded, then played."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any, Any]] = []
        self.at = 0

    def record(self, name: str, given: Any, ask: Callable[[], Any]) -> Any:
        """Ask, and note the answer."""
        self.entries.append((name, digest(given), None))
        try:
            answer = ask()
        except BaseException as error:
            self.entries.append((_RAISED, name, error))
            raise
        # Another thread may change a container; what counts is what was seen of it now.
        self.entries.append((_ANSWER, name, answer.copy() if isinstance(answer, dict | deque) else answer))
        return answer

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
            raise DifferentError(f"entry {self.at}: asks {name} {digest(given)}, and asked {asked} {was}")
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
    if isinstance(given, Order):
        return [given.position, given.tick_id, [dict(each) for each in given.parked]]
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

    def __call__(self) -> Any:
        return self.tape.record(self.name, None, self.real)

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

    def __call__(self) -> Any:
        return self.tape.play(self.name, None)

    def call(self, name: str, given: Any, named: Any) -> Any:
        return self.tape.play(name, [*given, *named.values()])


class RecordedProducer(Recorded):
    """Kafka's client: what it does with batches, and with the core while it sends, is noted too."""

    def call(self, name: str, attribute: str, given: Any, named: Any) -> Any:
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
            self._tape.entries.append((f"gate.{attribute}", [digest(given[:1]), *given[1:]], None))
            return getattr(self._core, attribute)(*given)

        return call


class PlayedProducer(Played):
    """The same from a tape."""

    def call(self, name: str, given: Any, named: Any) -> Any:
        publisher: Publisher = self.__dict__["publisher"]
        shown = [each for each in given if each is not publisher]

        def between(asked: str, given: Any) -> None:
            self.tape.at += 1
            (delivery,), *rest = given
            [found] = [each for each in publisher._deliveries if digest(each) == delivery]
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


class Recording:
    """One relay's publishing thread, from its beginning to its end."""

    def __init__(self, publisher: Publisher, *, until_empty: bool) -> None:
        self.tape = Tape()
        self.until_empty = until_empty
        self.patience = publisher.breaker._patience
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
        return Flow(publisher, **ports, **flags)

    def play(self) -> None:
        """Have the core do it again."""
        tape = self.tape
        producer: Any = PlayedProducer(tape, "producer")
        blocked: Any = Played(tape, "blocked")
        clock = Played(tape, "clock")
        publisher: Any
        if self.begins_at is None:
            publisher = Publisher(producer, blocked, patience=self.patience, clock=clock)
        else:
            ports: Any = {"patience": self.patience, "clock": clock, "new_id": Played(tape, "new_id")}
            publisher = TransactionalPublisher(producer, blocked, *self.begins_at, **ports)
        producer.__dict__["publisher"] = publisher
        names = ("batches", "ledger", "blocked", "retries", "crash_guard", "clock", "is_stopped")
        played: dict[str, Any] = {name: Played(tape, name) for name in names}
        flow = Flow(
            publisher,
            **played,
            until_empty=self.until_empty,
            on_complete=lambda batches: None,
        )
        publisher.ledger = flow
        try:
            while flow.step():
                pass
            publisher.discard()
        except EndOfTapeError:
            return


def _rewire(publisher: Any, producer: Any, blocked: Any, clock: Any) -> None:
    publisher._producer, publisher._blocked, publisher._clock = producer, blocked, clock
    if isinstance(publisher, TransactionalPublisher):
        publisher._transactions = producer
