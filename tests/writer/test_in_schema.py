"""Events for the outbox of another schema, in the same transaction: `in_schema`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import orm

from outbox_pipelines.database import schema
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.writer import NewEvent, OutboxError, emit, in_schema
from outbox_pipelines.writer.context import SCHEMA
from outbox_pipelines.writer.sqlalchemy import OutboxEvent
from outbox_pipelines.writer.testing import captured, events_of
from tests.schema.servers import Database, fresh
from tests.writer import targets
from tests.writer.targets import TARGETS, Target

BILLING = "Bill\"ing %s 'a'"


@pytest.fixture(scope="module")
def two(server: Postgres, template: str) -> Iterator[Database]:
    """A database with an outbox in `public`, and another one."""
    with fresh(server, template) as made:
        schema.migrate(made.settings.model_copy(update={"db_schema": BILLING}))
        yield made


class Undone(Exception):  # noqa: N818
    """Rolls a test's events back."""


def _write(through: targets.Through) -> list[str]:
    """Send each statement of the writer; return the types of the events that the outbox then has."""
    waited_for = through.emit("a", 1, "gone", {}, deliver_after=timedelta(hours=1), later_events_wait=True)
    assert through.emit("a", 1, "waits", {}).seq is None
    assert through.emit("a", 2, "bare", {"%s": "$1 outbox"}).seq is not None
    through.emit("a", 2, "full", {}, headers={"h": 1})
    through.emit("a", 2, "keyed", {}, idempotency_key="k")
    assert through.emit("a", 2, "keyed", {}, idempotency_key="k").duplicate
    through.emit_many([NewEvent("a", n, "lists", {}) for n in (2, 3)])
    through.emit_many([NewEvent("a", 2, "keyed lists", {}, idempotency_key=key) for key in "lm"])
    through.emit_many([NewEvent("a", 3, "array \x1e", {}), NewEvent("a", 3, "array", {})])
    assert through.cancel(waited_for.id)
    return [event.event_type for event in through.events_of()]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_every_target_and_statement(two: Database, target: Target) -> None:
    """Guards against a statement that goes to the outbox of the search_path, or to both."""
    with contextlib.suppress(Undone), target(two) as through:
        with in_schema(BILLING):
            types = _write(through)
            assert through.events_of()[1].payload == {"%s": "$1 outbox"}
        assert through.events_of() == []
        assert _write(through) == types
        with in_schema(BILLING):
            assert [event.event_type for event in through.events_of()] == types
        raise Undone


def test_an_object_of_a_session_keeps_its_outbox(two: Database) -> None:
    """Guards against an event that is written into another outbox because of when it is flushed."""
    with orm.Session(targets.engine(two)) as session, contextlib.suppress(Undone), session.begin():
        session.add(OutboxEvent("a", 1, "added", {}))
        with in_schema(BILLING):
            # Flushes first.
            emit(session, "a", 1, "emitted", {})
            assert [event.event_type for event in events_of(session)] == ["emitted"]
            with in_schema(None):
                assert [event.event_type for event in events_of(session)] == ["added"]
        raise Undone


def test_a_block_ends_and_is_captured() -> None:
    """Guards against a block that goes on after an error, and a test that needs the schema."""
    nothing: Any = None
    with contextlib.suppress(Undone), in_schema("none"):
        with captured() as events:
            emit(nothing, "a", 1, "e", {})
        assert len(events) == 1
        raise Undone
    assert SCHEMA.get() is None


@pytest.mark.parametrize("name", ["", 7, "a\0"])
def test_what_is_no_name_is_refused_before_anything_is_sent(name: Any) -> None:
    """Guards against a mistake that aborts the transaction."""
    with pytest.raises(OutboxError, match="give the name of the outbox's schema"), in_schema(name):
        pass
