"""The registry of handlers by event type, and the argument that each one asks for.

    def placed(event: Event, connection)                the event; also without an annotation
    def placed(event: Event[OrderPlaced], connection)   the event, whose payload is an OrderPlaced
    def placed(order: OrderPlaced, connection)          only the payload
    def placed(orders: list[OrderPlaced], connection)   with batch=…; `list[Event]` and so on

Invariants:
- A type has one handler; a function that the consumer cannot run, or an unsupported annotation, is rejected
  when the handler is registered.
- A consumer without handlers does not start: it would skip all events and commit their offsets.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, overload

from outbox_pipelines.consumer.config import require_one_of, require_whole
from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event_reading import Event
from outbox_pipelines.consumer.payload_types import MisfitError, converter
from outbox_pipelines.errors import SetupError

# Converts an event to the handler's argument.
Give = Callable[[Event], Any]
# Converts a payload.
Convert = Callable[[Any], Any]
_LISTS: Final = (list, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_ANY: Final = (Any, object, Event, inspect.Parameter.empty)
# Annotations that are imported only for the type checker.
_EVENTS: Final = re.compile(r"([\w.]+\[)?([\w.]+\.)?Event\]?")
Function = Callable[[Any, Any], object]
_Function = TypeVar("_Function", bound=Function)
MOST_AT_ONCE: Final = 10_000
Replays = Literal["skip", "handle", "only"]
_REPLAYS: Final = typing.get_args(Replays)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function of an event, or of a list of up to `batch` of them, and the connection or session."""

    function: Function
    give: Give
    """Converts an event to the function's argument."""
    batch: int | None = None
    per_transaction: int = 1
    """How many events can share a transaction, each with a call of its own."""
    replays: Replays = "skip"

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def takes(self, event: Event) -> bool:
        """Return whether the event is handled, as far as replays are concerned."""
        return self.replays == "handle" or (event.replay is not None) == (self.replays == "only")


class Handlers:
    """Handlers registered by decorators; the base of both consumers."""

    _is_asynchronous = False

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._other: Handler | None = None

    def on(
        self,
        *types: str | type,
        batch: int | None = None,
        per_transaction: int = 1,
        replays: Replays = "skip",
    ) -> Callable[[_Function], _Function]:
        """Register a handler of these event types: a function of the event and the connection or session.

        A type is a text, or a class that has it as `__event_type__`, as typed events of the writer do. With
        one class, the payload of an `Event` is an object of it; with several of one event type, of that whose
        `__event_version__` the event has, otherwise of the first one.

        Instead of the event, it gets the payload as a dataclass, a pydantic model or a dict, if its first
        parameter is annotated with one; see `annotations`. An event that does not fit is a dead letter.

        Its writes are committed together with the record of the event, or not at all. It must neither
        commit nor roll back. If it raises, the event is tried again later: see docs/consuming-failures.md.

        Args:
            batch: the function takes a list of up to this many events, in one transaction. If it raises, the
                events are tried again one by one, each in its own list.
            per_transaction: up to this many events that have arrived share a transaction, with a call for
                each. If one fails, all are rolled back and handled again one by one: only for handlers
                without effects outside the database.
            replays: the treatment of events that `outbox replay` has published again: they are skipped and
                counted; handled, once per replay; or only they are handled, and other events are ignored.

        Raises:
            SetupError: a type has a handler already, or the function is of the other consumer's kind.
        """
        names: list[Any] = [getattr(one, "__event_type__", one) for one in types]
        if not names or not all(isinstance(one, str) for one in names):
            raise SetupError(
                'give the event types: @consumer.on("order.placed"), or a class that has __event_type__'
            )
        if batch is not None:
            require_whole("batch", batch, 1, MOST_AT_ONCE, of="events")
            if per_transaction != 1:
                raise SetupError("give batch or per_transaction, not both: a batch is one transaction")
        require_whole("per_transaction", per_transaction, 1, MOST_AT_ONCE, of="events")
        require_one_of("replays", replays, *_REPLAYS)

        def register(function: _Function) -> _Function:
            self._require_kind(function)
            if taken := self._handlers.keys() & set(names):
                raise SetupError(f"{min(taken)} has a handler already: keep one")
            # Types that differ have no class in common.
            classes = [one for one in types if isinstance(one, type) and len({*names}) == 1]
            handler = Handler(function, giver(function, batch, *classes), batch, per_transaction, replays)
            self._handlers.update(dict.fromkeys(names, handler))
            return function

        return register

    @overload
    def on_other(self, function: _Function, /) -> _Function: ...

    @overload
    def on_other(
        self, /, *, per_transaction: int = ..., replays: Replays = ...
    ) -> Callable[[_Function], _Function]: ...

    def on_other(
        self, function: Any = None, /, *, per_transaction: int = 1, replays: Replays = "skip"
    ) -> Any:
        """Register the handler of all other types. Without one, their events are skipped and counted.

        Args:
            per_transaction: see `on`.
            replays: see `on`.

        Raises:
            SetupError: there is one already, or the function is of the other consumer's kind.
        """
        require_whole("per_transaction", per_transaction, 1, MOST_AT_ONCE, of="events")
        require_one_of("replays", replays, *_REPLAYS)

        def register(function: _Function) -> _Function:
            self._require_kind(function)
            if self._other is not None:
                raise SetupError("on_other has a handler already: keep one")
            self._other = Handler(function, giver(function, None), None, per_transaction, replays)
            return function

        return register if function is None else register(function)

    def handler(self, event_type: str) -> Handler | None:
        """Return the handler of a type; None if its events are skipped."""
        return self._handlers.get(event_type, self._other)

    @property
    def types(self) -> list[str]:
        """The event types with their own handler."""
        return [*self._handlers]

    def _require_any(self) -> None:
        """Raise SetupError if there is no handler."""
        if not self._handlers and self._other is None:
            raise SetupError(
                "the consumer has no handler and would skip all events: register one with "
                '@consumer.on("order.placed") or @consumer.on_other before it is run'
            )

    @property
    def other(self) -> Handler | None:
        """The handler of all other types."""
        return self._other

    @property
    def at_once(self) -> int:
        """The most events that one transaction has."""
        return max((each.batch or each.per_transaction for each in self._all), default=1)

    @property
    def shares(self) -> bool:
        """Whether events of any handler can share a transaction."""
        return any(each.per_transaction > 1 for each in self._all)

    @property
    def _all(self) -> Iterator[Handler]:
        yield from self._handlers.values()
        if self._other is not None:
            yield self._other

    def _require_kind(self, function: Function) -> None:
        _require_two(function)
        is_asynchronous = inspect.iscoroutinefunction(function)
        if is_asynchronous and not self._is_asynchronous:
            raise SetupError(
                f"{function.__name__} is asynchronous: define it without async, or use AsyncConsumer"
            )
        if self._is_asynchronous and not is_asynchronous:
            raise SetupError(f"{function.__name__} would block the event loop: define it with async")


def _require_two(function: Function) -> None:
    """Raise SetupError unless the function accepts an event (or a list) and the connection or session."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # One written in C, which does not tell.
        return
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise SetupError(
            f"{name}{signature} cannot be called with an event and a connection: write for example "
            f"def {name}(event, connection)"
        ) from None


def giver(function: Callable[..., object], batch: int | None, *classes: type) -> Give:
    """Return a function that converts an event to the handler's argument, or raises `UnreadableError`.

    Args:
        classes: of the events' payload where the annotation names none; several are those of versions.

    Raises:
        SetupError: the annotation is not supported.
    """
    name = getattr(function, "__name__", type(function).__name__)
    kind = _first(function, name)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if batch is not None and kind not in _ANY:
        if (origin or kind) not in _LISTS:
            raise SetupError(
                f"{name} has batch={batch} and is called with a list: annotate for example list[Event]"
            )
        kind = arguments[0] if arguments else Event
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    elif (origin or kind) in _LISTS:
        raise SetupError(f"{name} takes a list: register it with batch=…, or annotate one event")
    if kind in _ANY and not classes:
        return _event
    if kind in _ANY:
        origin, arguments = Event, (typing.Union[classes],)  # noqa: UP007 - at run time
    has_event = origin is Event
    payload_kind = arguments[0] if has_event else kind
    for member in _members(payload_kind):
        if classes and _event_type(member) not in (None, _event_type(classes[0])):
            raise SetupError(
                f"{name} handles {_event_type(classes[0])} and its annotation names {member.__name__}, a "
                f"class of {_event_type(member)}: annotate {_named(classes)}"
            )
    try:
        converter_of = _by_version(payload_kind, classes)
    except SetupError as error:
        raise SetupError(f"{name}: {error}") from None

    def give(event: Event) -> Any:
        try:
            value = event.payload
        except ValueError as error:
            raise UnreadableError(f"{event} is rejected: {error}") from None
        try:
            payload = converter_of(event)(value)
        except MisfitError as error:
            raise UnreadableError(f"{event} is rejected: {error}") from None
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"{event} is rejected: {type(error).__name__}") from None
        return event._with_payload(payload) if has_event else payload

    return give


def _by_version(kind: Any, classes: tuple[type, ...]) -> Callable[[Event], Convert]:
    """Return a function that chooses how an event's payload is converted.

    Args:
        kind: what is annotated.
        classes: those of the versions of an event type, if there are several.

    Raises:
        SetupError: there is no way to convert, or it is not clear which one is meant.
    """
    named = _members(kind)
    if len(classes) < 2 or not any(each in named for each in classes):
        convert = converter(kind)
        return lambda event: convert
    others = tuple(each for each in named if each not in classes)
    by_version = {
        getattr(each, "__event_version__", None): converter(typing.Union[(each, *others)]) for each in classes
    }
    if not all(each in named for each in classes):
        raise SetupError(f"it handles several versions: annotate {_named(classes)}")
    if len(by_version) < len(classes):
        raise SetupError(
            f"{_named(classes)} need an __event_version__ each, which the event's is compared with"
        )
    first = next(iter(by_version.values()))
    return lambda event: by_version.get(event.version, first)


def _members(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _named(classes: tuple[type, ...]) -> str:
    return " | ".join(each.__name__ for each in classes)


def _event_type(kind: Any) -> object:
    return getattr(kind, "__event_type__", None)


def _event(event: Event) -> Event:
    return event


def _first(function: Callable[..., object], name: str) -> Any:
    """Return the resolved annotation of the first parameter; others can be unresolvable."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:
        # A function written in C.
        return Event
    annotation = parameters[0].annotation
    if annotation is inspect.Parameter.empty:
        return Event
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=_globals(function))["it"]
    except (NameError, AttributeError, TypeError) as error:
        if isinstance(annotation, str) and _EVENTS.fullmatch(annotation):
            return list[Event] if "[" in annotation else Event
        raise SetupError(
            f"the annotation {annotation!r} of {name} cannot be resolved ({error}): import the class outside "
            "of TYPE_CHECKING, and define it in the module"
        ) from None


def _globals(function: Any) -> dict[str, Any]:
    """Return the globals of the module in which the function is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):
        function = getattr(function, "__func__", None) or type(function).__call__
    found: dict[str, Any] = getattr(function, "__globals__", {})
    return found
