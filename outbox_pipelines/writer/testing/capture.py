"""Capture the events that `emit` and `emit_many` would write, without a database.

Invariants:
- A missing `await`, or one too many, fails here as in production.
- The end of the block restores the previous state, even after an error.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from outbox_pipelines.writer.content import Row
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.statements import CANCEL, Query
from outbox_pipelines.writer.targets import INSTEAD, Way, way_of
from outbox_pipelines.writer.testing.written import WrittenEvent, written

Answer = tuple[UUID, int | None, bool]


@contextmanager
def captured(*, asynchronous: bool = False) -> Iterator[list[WrittenEvent]]:
    """Collect the events of the block instead of writing them; any target is accepted, even None.

    It applies to the whole process, all threads and tasks; of nested blocks, the innermost collects. Each
    begins with an empty outbox: `seq` from 1, no idempotency keys. The target is not used, so neither
    autocommit nor a rollback is detected: see `events_of`.

    Args:
        asynchronous: whether `emit` is awaited for a target of an unknown type: None, or an object of your
            own. Types supported by `emit` are recognized, and so are mocks made with `spec=` of them.

    Yields:
        The events so far, in order; duplicates are reported to their writers and not listed. The list remains
        after the block.
    """
    recorder = _Recorder(asynchronous)
    finder = recorder.way_through
    INSTEAD.append(finder)
    try:
        yield recorder.events
    finally:
        INSTEAD.remove(finder)


class _Recorder:
    def __init__(self, asynchronous: bool) -> None:
        self.events: Final[list[WrittenEvent]] = []
        self._keys: Final[dict[str, UUID]] = {}
        self._delayed: Final[dict[UUID, WrittenEvent]] = {}
        self._waited_for: Final[dict[UUID, tuple[str, str]]] = {}
        self._lock: Final = threading.Lock()
        self._number = 0
        self._asynchronous = asynchronous

    def way_through(self, target: object) -> Way:
        try:
            # For a mock, the class given as `spec`.
            asynchronous = way_of(target.__class__).asynchronous
        except OutboxError:
            asynchronous = self._asynchronous
        return Way(self._write_later if asynchronous else self._write, asynchronous=asynchronous)

    async def _write_later(self, target: object, query: Query) -> list[Answer] | list[tuple[bool]]:
        return self._write(target, query)

    def _write(self, _: object, query: Query) -> list[Answer] | list[tuple[bool]]:
        with self._lock:
            if query.statement is CANCEL:
                return [(self._cancel(UUID(str(query.values[0]))),)]
            return [self._write_row(row) for row in query.rows]

    def _write_row(self, row: Row) -> Answer:
        key = row.idempotency_key
        if key is not None and key in self._keys:
            return self._keys[key], None, True
        self._number += 1
        event = written(_uuid7(), self._number, row)
        if event.deliver_after is not None and event.deliver_after <= datetime.now(UTC):
            event = event._replace(deliver_after=None, later_events_wait=False)
        aggregate = event.aggregate_type, event.aggregate_id
        is_delayed = event.deliver_after is not None or aggregate in self._waited_for.values()
        self.events.append(event)
        if is_delayed:
            self._delayed[event.id] = event
        if event.later_events_wait:
            self._waited_for[event.id] = aggregate
        if key is not None:
            self._keys[key] = event.id
        return event.id, None if is_delayed else event.seq, False

    def _cancel(self, id: UUID) -> bool:
        self._waited_for.pop(id, None)
        if (event := self._delayed.pop(id, None)) is None:
            return False
        self.events.remove(event)
        return True


def _uuid7() -> UUID:
    milliseconds, random = time.time_ns() // 1_000_000, secrets.randbits(74)
    return UUID(int=milliseconds << 80 | 7 << 76 | (random >> 62) << 64 | 2 << 62 | random & (1 << 62) - 1)
