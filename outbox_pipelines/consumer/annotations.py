"""Derive a handler's argument from the annotation of its first parameter.

    def placed(event: Event, connection)                the event; also without an annotation
    def placed(event: Event[OrderPlaced], connection)   the event, whose payload is an OrderPlaced
    def placed(order: OrderPlaced, connection)          only the payload
    def placed(orders: list[OrderPlaced], connection)   with batch=…; `list[Event]` and so on

Invariants:
- An unsupported annotation is rejected when the handler is registered.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Final

from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event import Event
from outbox_pipelines.consumer.payloads import MisfitError, converter
from outbox_pipelines.errors import SetupError

# Converts an event to the handler's argument.
Give = Callable[[Event], Any]
_LISTS: Final = (list, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_ANY: Final = (Any, object, Event, inspect.Parameter.empty)
# Annotations that are imported only for the type checker.
_EVENTS: Final = re.compile(r"([\w.]+\[)?([\w.]+\.)?Event\]?")


def giver(function: Callable[..., object], batch: int | None, payload: type | None = None) -> Give:
    """Return a function that converts an event to the handler's argument, or raises `UnreadableError`.

    Args:
        payload: the class of the events' payload where the annotation names none.

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
    if kind in _ANY and payload is None:
        return _event
    if kind in _ANY:
        origin, arguments = Event, (payload,)
    has_event = origin is Event
    try:
        convert = converter(arguments[0] if has_event else kind)
    except SetupError as error:
        raise SetupError(f"{name}: {error}") from None

    def give(event: Event) -> Any:
        try:
            payload = convert(event.payload)
        except MisfitError as error:
            raise UnreadableError(f"{event} is rejected: {error}") from None
        except ValueError:
            raise UnreadableError(f"{event} is rejected: its value is not JSON") from None
        return event.with_payload(payload) if has_event else payload

    return give


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
