"""Write a session's events at its flushes, and restore or discard them at its rollbacks.

SQLAlchemy orders its own INSERTs by mapper, not by `session.add`, and events must follow the rows whose locks
determine their order. So events leave the session before the flush, and are written after the rows.

Invariants:
- Nothing is flushed through a connection in autocommit mode.
- Events that were not written are discarded when SQLAlchemy discards their objects, or the changes of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox_pipelines.writer.calls import write
from outbox_pipelines.writer.content import Row
from outbox_pipelines.writer.context import in_schema
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.events import Emitted
from outbox_pipelines.writer.sqlalchemy.outbox_event import OutboxEventMixin
from outbox_pipelines.writer.sqlalchemy.recording import (
    HAS_WRITTEN,
    Recorded,
    RecordsEvents,
    discard,
    refuse_torn,
    with_id,
)
from outbox_pipelines.writer.targets import INSTEAD
from outbox_pipelines.writer.targets.sqlalchemy import refuse_split, refuse_unfit

# Keys in `session.info`: events that have left the session and wait for the rows; and those that have been
# written, as long as they can be rolled back.
_WAITING: Final = "outbox_pipelines.waiting"
_WRITTEN: Final = "outbox_pipelines.written"


class _Entry(NamedTuple):
    """An event that is about to be written, through the connection of a mapped class."""

    kind: type
    schema: str | None
    row: Row
    done: Callable[[Emitted], None]


class _Written(NamedTuple):
    """An event, or an aggregate's recorded events, written within a savepoint or outside."""

    savepoint: SessionTransaction | None
    origin: OutboxEventMixin | RecordsEvents
    recorded: list[Recorded]

    def is_within(self, transaction: SessionTransaction) -> bool:
        around = self.savepoint
        while around is not None and around is not transaction:
            around = around.parent
        return around is transaction


def listen() -> None:
    """Register the listeners for every session of the process."""
    event.listen(Session, "before_flush", _before_flush)
    event.listen(Session, "after_flush", _after_flush)
    event.listen(Session, "after_flush_postexec", _flushed)
    event.listen(Session, "before_commit", _before_commit)
    event.listen(Session, "after_commit", _after_commit)
    # If the flush fails, its new objects are still pending.
    event.listen(Session, "pending_to_transient", _restore)
    event.listen(Session, "persistent_to_transient", _restore)
    event.listen(Session, "after_soft_rollback", _forget)
    event.listen(Session, "after_transaction_end", _end)
    event.listen(OutboxEventMixin, "before_insert", _refuse_late, propagate=True)
    event.listen(RecordsEvents, "expire", discard, propagate=True)
    event.listen(
        RecordsEvents, "refresh", lambda one, _, attributes: discard(one, attributes), propagate=True
    )


def _before_flush(session: Session, context: object, instances: Sequence[object] | None) -> None:
    # Of a flush that failed.
    session.info.pop(HAS_WRITTEN, None)
    added = [one for one in session.new if isinstance(one, OutboxEventMixin)]
    recording = _recording(session)
    if instances and (apart := [one for one in recording if one not in instances]):
        raise OutboxError(
            f"session.flush was given a part of the objects, and {type(apart[0]).__name__}, which is none of "
            "them, has recorded events: call session.flush() without arguments"
        )
    for one in added:
        if "_row" not in one.__dict__:
            raise OutboxError(
                f"{type(one).__name__} is a row of the outbox, not a new event: create another event"
            )
        if one._is_written:
            raise OutboxError(
                f"{one.event_type} was added to the session again after it had been written: create another "
                "event, or add this one only once"
            )
    for aggregate in recording:
        refuse_torn(aggregate)
    # Tests that capture events may use any database.
    for kind in {type(one) for one in (*added, *recording)} if not INSTEAD else ():
        refuse_unfit(_connection(session, kind))
    for one in added:
        session.expunge(one)
    if added:
        session.info.setdefault(_WAITING, []).extend(added)
    if not (session.new or session.dirty or session.deleted):
        # Without rows the flush ends here.
        _write(session)


def _after_flush(session: Session, context: object) -> None:
    _write(session)
    session.info[HAS_WRITTEN] = True


def _flushed(session: Session, context: object) -> None:
    session.info.pop(HAS_WRITTEN, None)


def _before_commit(session: Session) -> None:
    session.flush()
    # Events may still wait: SQLAlchemy ends a flush early if its only rows were orphans.
    _write(session)


def _write(session: Session) -> None:
    waiting: list[OutboxEventMixin] = session.info.pop(_WAITING, [])
    entries = [_Entry(type(one), one.__table__.schema, one._row, one._written) for one in waiting]
    _remember(session, [(one, []) for one in waiting])
    entries += _drained(session)
    by_place: dict[tuple[Connection, str | None], list[_Entry]] = {}
    for entry in entries:
        by_place.setdefault((_connection(session, entry.kind), entry.schema), []).append(entry)
    for (connection, schema), group in by_place.items():
        if not INSTEAD:
            refuse_split(session, connection)
        # That of their class, also within a block of the caller's.
        with in_schema(schema):
            emitted = write(connection, [entry.row for entry in group])
        for entry, outcome in zip(group, emitted, strict=True):
            entry.done(outcome)


def _drained(session: Session) -> list[_Entry]:
    """Remove the recorded events from their aggregates and return them, in the order of `record`."""
    recording = _recording(session)
    recorded = [(one, aggregate) for aggregate in recording for one in aggregate._outbox_recorded or ()]
    recorded.sort(key=lambda pair: pair[0].number)
    _remember(session, [(one, one._outbox_recorded or []) for one in recording])
    for aggregate in recording:
        aggregate._outbox_recorded = None
    return [
        _Entry(type(aggregate), aggregate.__outbox_schema__, with_id(one, aggregate), lambda _: None)
        for one, aggregate in recorded
    ]


def _remember(
    session: Session, written: Sequence[tuple[OutboxEventMixin | RecordsEvents, list[Recorded]]]
) -> None:
    savepoint = session.get_nested_transaction()
    if written:
        session.info.setdefault(_WRITTEN, []).extend(_Written(savepoint, *one) for one in written)


def _recording(session: Session) -> list[RecordsEvents]:
    return [
        one
        for one in (*session.new, *session.dirty, *session.deleted)
        if isinstance(one, RecordsEvents) and one._outbox_recorded
    ]


def _connection(session: Session, kind: type) -> Connection:
    return session.connection(bind_arguments={"mapper": kind})


def _restore(session: Session, instance: object) -> None:
    """Restore the events of an object whose INSERT is rolled back: the object can be added again."""
    if isinstance(instance, RecordsEvents):
        written: list[_Written] = session.info.get(_WRITTEN, [])
        again = [one for entry in written if entry.origin is instance for one in entry.recorded]
        instance._outbox_recorded = [*again, *(instance._outbox_recorded or ())]


def _forget(session: Session, previous: SessionTransaction) -> None:
    session.info.pop(_WAITING, None)
    session.info.pop(HAS_WRITTEN, None)
    written: list[_Written] = session.info.get(_WRITTEN, [])
    _undo(entry for entry in written if entry.is_within(previous))
    written[:] = [entry for entry in written if not entry.is_within(previous)]


def _after_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        session.info.pop(_WRITTEN, None)


def _end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        _undo(session.info.pop(_WRITTEN, ()))


def _undo(written: Iterable[_Written]) -> None:
    """Let events that were rolled back be added again."""
    for entry in written:
        if isinstance(entry.origin, OutboxEventMixin):
            entry.origin._is_written = False


def _refuse_late(mapper: object, connection: object, target: Any) -> None:
    raise OutboxError(
        f"{type(target).__name__} was added during the session's flush, too late to follow the rows: "
        "add it before the flush, or in a before_flush listener registered with insert=True"
    )
