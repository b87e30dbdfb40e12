"""Refuse to copy objects without their events.

SQLAlchemy has no events for the methods of a session that copy objects: they are wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import sqlalchemy
from sqlalchemy.orm import Session

from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.sqlalchemy.outbox_event import OutboxEventMixin
from outbox_pipelines.writer.sqlalchemy.recording import RecordsEvents

# The methods, and the parameter for the objects.
_METHODS: Final = {"merge": "instance", "merge_all": "instances", "bulk_save_objects": "objects"}


def refuse_copies() -> None:
    """Wrap the methods for every session of the process; older releases of SQLAlchemy have no `merge_all`."""
    for name, parameter in _METHODS.items():
        if method := getattr(Session, name, None):
            setattr(Session, name, _refusing(method, parameter))


def _refusing(method: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    def refusing(session: Session, *arguments: Any, **options: Any) -> Any:
        given, *rest = arguments or (options.pop(parameter),)
        objects = [given] if name == "merge" else list(given)
        for one in objects:
            _refuse(session, name, one)
            for cascaded in _merged_with(one) if name != "bulk_save_objects" else ():
                _refuse(session, name, cascaded)
        return method(session, given if name == "merge" else objects, *rest, **options)

    return refusing


def _merged_with(one: object) -> Iterator[object]:
    state = sqlalchemy.inspect(one, raiseerr=False)
    # An object that is not mapped: SQLAlchemy refuses it.
    if isinstance(state, sqlalchemy.orm.InstanceState):
        for cascaded, *_ in state.mapper.cascade_iterator("merge", state):
            yield cascaded


def _refuse(session: Session, name: str, one: Any) -> None:
    if isinstance(one, OutboxEventMixin) and "_row" in one.__dict__:
        raise OutboxError(
            f"{type(one).__name__} was passed to session.{name}, which copies it: pass it to session.add"
        )
    # `merge` returns a row of the session itself.
    is_kept = name != "bulk_save_objects" and one in session and sqlalchemy.inspect(one).persistent
    if isinstance(one, RecordsEvents) and one._outbox_recorded and not is_kept:
        raise OutboxError(
            f"{type(one).__name__} has recorded {one._outbox_recorded[0].row.event_type}, and session.{name} "
            f"copies an object without its events: pass it to session.add, or record after session.{name}"
        )
