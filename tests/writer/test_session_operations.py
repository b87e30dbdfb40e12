"""Every operation of SQLAlchemy's session, on rows that record events and on events.

An event is written if and only if its change is, and once.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.writer import OutboxError
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, RecordsEvents, flush
from tests.schema.servers import Database
from tests.writer import targets


class Base(orm.DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "operated_orders"
    __aggregate_type__ = "operated"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str] = orm.mapped_column(default="new")
    note: orm.Mapped[str | None] = orm.mapped_column(default=None)
    touched: orm.Mapped[Any] = orm.mapped_column(
        sqlalchemy.DateTime(timezone=True),
        server_default=sqlalchemy.func.now(),
        onupdate=sqlalchemy.func.now(),
    )
    lines: orm.Mapped[list[Line]] = orm.relationship(back_populates="order", cascade="all, delete-orphan")


class Line(RecordsEvents, Base):
    """Operations on an order cascade to it."""

    __tablename__ = "operated_lines"
    __aggregate_type__ = "operated"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str] = orm.mapped_column(default="new")
    order_id: orm.Mapped[int] = orm.mapped_column(sqlalchemy.ForeignKey("operated_orders.id"))
    order: orm.Mapped[Order] = orm.relationship(back_populates="lines")


Row = Order | Line
Operation = Callable[[Any, Any], object]
make_transient: Any = orm.make_transient

BY_ID = sqlalchemy.select(Order).order_by(Order.id)


def set_state(session: orm.Session, state: str, **options: Any) -> None:
    session.execute(sqlalchemy.update(Order).values(state=state), execution_options=options)


def in_savepoint(end: str) -> Operation:
    def operate(session: orm.Session, order: Order) -> None:
        savepoint = session.begin_nested()
        session.refresh(order)
        order.note = "again"
        order.record("again", {})
        getattr(savepoint, end)()

    return operate


def number(one: Any) -> int:
    return one.id if isinstance(one.id, int) else 0


# An entry for each public method of the session, by name; more than one if its arguments matter.
OPERATIONS: dict[str, Operation] = {
    "add": lambda session, order: session.add(order),
    "add_all": lambda session, order: session.add_all([order, order]),
    "begin": lambda session, order: session.begin(),
    "begin_nested": lambda session, order: session.begin_nested().commit(),
    "begin_nested, rollback": in_savepoint("rollback"),
    "begin_nested, commit": in_savepoint("commit"),
    "bulk_insert_mappings": lambda session, order: session.bulk_insert_mappings(
        sqlalchemy.inspect(Order), [{"state": "bulk"}]
    ),
    "bulk_save_objects": lambda session, order: session.bulk_save_objects([order]),
    "bulk_update_mappings": lambda session, order: session.bulk_update_mappings(
        sqlalchemy.inspect(Order), [{"id": number(order), "note": "bulk"}]
    ),
    "close": lambda session, order: session.close(),
    "close, add": lambda session, order: (session.close(), session.add(order)),
    "close_all_sessions": lambda session, order: orm.close_all_sessions(),
    "commit": lambda session, order: session.commit(),
    "connection": lambda session, order: session.connection(),
    "delete": lambda session, order: session.delete(order),
    "delete_all": lambda session, order: session.delete_all([order]),
    "enable_relationship_loading": lambda session, order: session.enable_relationship_loading(order),
    "execute": lambda session, order: session.execute(BY_ID).all(),
    "execute, populate_existing": lambda session, order: session.execute(
        BY_ID, execution_options={"populate_existing": True}
    ).all(),
    "execute, update by evaluate": lambda session, order: set_state(
        session, "updated", synchronize_session="evaluate"
    ),
    "execute, update by fetch": lambda session, order: set_state(
        session, "updated", synchronize_session="fetch"
    ),
    "execute, update": lambda session, order: set_state(session, "updated"),
    "execute, update alone": lambda session, order: set_state(session, "updated", synchronize_session=False),
    "execute, delete": lambda session, order: session.execute(sqlalchemy.delete(Order)),
    "execute, insert": lambda session, order: session.execute(
        sqlalchemy.insert(Order), [{"state": "inserted"}]
    ),
    "expire": lambda session, order: session.expire(order),
    "expire, changed": lambda session, order: session.expire(order, ["state"]),
    "expire, another": lambda session, order: session.expire(order, ["note"]),
    "expire_all": lambda session, order: session.expire_all(),
    "expunge": lambda session, order: session.expunge(order),
    "expunge, add": lambda session, order: (session.expunge(order), session.add(order)),
    "expunge_all": lambda session, order: session.expunge_all(),
    "expunge_all, add": lambda session, order: (session.expunge_all(), session.add(order)),
    "flush": lambda session, order: session.flush(),
    "flush twice": lambda session, order: (session.flush(), session.add(order), session.flush()),
    "get": lambda session, order: session.get(Order, number(order)),
    "get, populate_existing": lambda session, order: session.get(
        Order, number(order), populate_existing=True
    ),
    "get, with_for_update": lambda session, order: session.get(Order, number(order), with_for_update=True),
    "get, both": lambda session, order: session.get(
        Order, number(order), with_for_update=True, populate_existing=True
    ),
    "get_one": lambda session, order: session.get_one(Order, number(order), populate_existing=True),
    "invalidate": lambda session, order: session.invalidate(),
    "invalidate, add": lambda session, order: (session.invalidate(), session.add(order)),
    "merge": lambda session, order: session.merge(order),
    "merge, expunged": lambda session, order: (session.expunge(order), session.merge(order)),
    "merge, load=False": lambda session, order: (session.expunge(order), session.merge(order, load=False)),
    "merge, pickled": lambda session, order: (
        session.expunge(order),
        session.merge(pickle.loads(pickle.dumps(order))),
    ),
    "merge_all": lambda session, order: (session.expunge(order), session.merge_all(iter([order]))),
    "prepare": lambda session, order: session.prepare(),
    "query": lambda session, order: session.query(Order).all(),
    "query, populate_existing": lambda session, order: session.query(Order).populate_existing().all(),
    "query, update": lambda session, order: session.query(Order).update({"state": "updated"}),
    "query, with_for_update": lambda session, order: (
        session.query(Order).populate_existing().with_for_update().all()
    ),
    "refresh": lambda session, order: session.refresh(order),
    "refresh, with_for_update": lambda session, order: session.refresh(order, with_for_update=True),
    "refresh, changed": lambda session, order: session.refresh(order, ["state"]),
    "refresh, another": lambda session, order: session.refresh(order, ["touched"]),
    "refresh, lines": lambda session, order: session.refresh(order, ["lines"]),
    "reset": lambda session, order: session.reset(),
    "reset, add": lambda session, order: (session.reset(), session.add(order)),
    "rollback": lambda session, order: session.rollback(),
    "rollback, add": lambda session, order: (session.rollback(), session.add(order)),
    "flush, rollback, add": lambda session, order: (session.flush(), session.rollback(), session.add(order)),
    "flush, close, add": lambda session, order: (session.flush(), session.close(), session.add(order)),
    "scalar": lambda session, order: session.scalar(BY_ID),
    "scalars": lambda session, order: session.scalars(
        BY_ID, execution_options={"populate_existing": True}
    ).all(),
    # Functions that act on objects of a session.
    "make_transient": lambda session, order: make_transient(order),
    "make_transient, add": lambda session, order: (make_transient(order), session.add(order)),
}
# What neither reads nor writes a row.
UNRELATED = {
    *("bind_mapper", "bind_table", "get_bind", "get_nested_transaction", "get_transaction", "identity_key"),
    *("in_nested_transaction", "in_transaction", "is_modified", "object_session"),
}


@pytest.fixture(scope="module")
def engine(kept: Database) -> Iterator[sqlalchemy.Engine]:
    """Of all tests, with a pool: a thousand sessions would open a connection each."""
    engine = sqlalchemy.create_engine(targets.url("psycopg", kept))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_each_method_of_the_session_is_tried() -> None:
    """Guards against a method of a newer SQLAlchemy that has not been tried."""
    public = {
        name for name, _ in inspect.getmembers(orm.Session, inspect.isfunction) if not name.startswith("_")
    }
    tried = {name.partition(",")[0] for name in OPERATIONS}
    assert public - tried - UNRELATED == set()


@pytest.mark.parametrize("name", OPERATIONS)
def test_recorded_events(engine: sqlalchemy.Engine, kept: Database, name: str) -> None:
    """Guards against an event of a change that the session has discarded, and a change without its event."""
    wrong = {}
    for kind, autoflush in itertools.product(("row", "new row", "new row, flushed", "child"), (True, False)):
        state = uuid.uuid4().hex
        with orm.Session(engine, autoflush=autoflush) as session:
            changed = change(session, kind, state)
            outcome = completed(session, OPERATIONS[name], changed)
        rows = sum(
            kept.value(f"SELECT count(*) FROM {table} WHERE state = %s", state)
            for table in ("operated_orders", "operated_lines")
        )
        events = kept.value("SELECT count(*) FROM outbox WHERE event_type = %s", state)
        # The event of a row that is deleted is its last one; a statement may change the row again.
        is_later = name in ("delete", "delete_all") or (autoflush and "update" in name)
        if rows != events and not (is_later and (rows, events) == (0, 1)):
            wrong[kind, autoflush] = f"{rows} rows, {events} events, {outcome}"
    assert wrong == {}


def change(session: orm.Session, kind: str, state: str) -> Order:
    """Change a row and record that; return the order, which may be its parent."""
    order = Order()
    changed: Row = order
    session.add(order)
    if kind == "child":
        order.lines.append(changed := Line())
    if kind in ("row", "child"):
        session.commit()
        # Loaded.
        assert (order.id, order.lines, changed.state)[2] == "new"
    if kind == "new row, flushed":
        session.flush()
    changed.state = state
    changed.record(state, {})
    return order


def completed(session: orm.Session, operation: Operation, one: object) -> object:
    """Operate and commit; return the error that refused one of them."""
    outcome: object = "no error"
    try:
        operation(session, one)
    except (OutboxError, sqlalchemy.exc.SQLAlchemyError, AttributeError) as error:
        outcome = error
    try:
        session.commit()
    except (OutboxError, sqlalchemy.exc.SQLAlchemyError) as error:
        outcome = error
        session.rollback()
    return outcome


# After these the session no longer has an event that was not flushed; nor, in the second set, any other.
LEFT = {"expunge", "expunge_all", "make_transient"}
ENDED = {"close", "close_all_sessions", "invalidate", "reset", "rollback"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_events(engine: sqlalchemy.Engine, kept: Database, name: str) -> None:
    """Guards against an event that an operation copies, writes twice, or loses without an error."""
    wrong = {}
    for flushed, autoflush in itertools.product((True, False), (True, False)):
        event = OutboxEvent("operated", 1, uuid.uuid4().hex, {})
        with orm.Session(engine, autoflush=autoflush) as session:
            session.add(event)
            if flushed:
                session.flush()
            outcome = completed(session, OPERATIONS[name], event)
        written = kept.value("SELECT count(*) FROM outbox WHERE event_type = %s", event.event_type)
        expected = {0} if name in (ENDED if flushed else ENDED | LEFT) else {1}
        if outcome != "no error":
            expected = {0, 1}
        if written not in expected:
            wrong[flushed, autoflush] = (written, outcome)
    assert wrong == {}


def test_an_event_is_written_once(engine: sqlalchemy.Engine, kept: Database) -> None:
    """Guards against a second row of an event that is added again, as `session.add` of a row allows."""
    event = OutboxEvent("operated", 1, uuid.uuid4().hex, {})
    with orm.Session(engine) as session:
        for end in (session.flush, session.commit):
            session.add(event)
            end()
            session.add(event)
            with pytest.raises(OutboxError, match="added to the session again after it had been written"):
                session.flush()
            session.rollback()
    assert kept.value("SELECT count(*) FROM outbox WHERE event_type = %s", event.event_type) == 1


@pytest.mark.parametrize("operate", [orm.Session.expire, orm.Session.refresh])
def test_a_part_of_the_changes(
    engine: sqlalchemy.Engine, kept: Database, operate: Callable[[orm.Session, object, list[str]], None]
) -> None:
    """Guards against an event of two changes of which the session has discarded one."""
    with orm.Session(engine) as session:
        order = change(session, "row", state := uuid.uuid4().hex)
        operate(session, order, ["touched"])
        session.commit()
        order.note = "two"
        order.state = "three"
        order.record("three", {})
        with pytest.raises(OutboxError, match=r"Order has recorded three, .* change of state .*flush\(\)"):
            _and_commit(session, operate, order)
        session.rollback()
        found: Any = (order.state, order.note)
        assert found == (state, None)
        order.note = "four"
        session.commit()


def _and_commit(session: orm.Session, operate: Callable[..., None], order: Order) -> None:
    # `refresh` flushes the session itself.
    operate(session, order, ["state"])
    session.commit()


def test_a_flush_that_fails_at_its_events(
    engine: sqlalchemy.Engine, kept: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a second attempt with the same new object that writes its row and no event."""

    def fail(*arguments: object) -> NoReturn:
        raise LookupError

    with orm.Session(engine) as session:
        order = change(session, "new row", state := uuid.uuid4().hex)
        with monkeypatch.context() as patch:
            patch.setattr(flush, "write", fail)
            with pytest.raises(LookupError):
                session.flush()
        session.rollback()
        session.add(order)
        session.commit()
    assert kept.value("SELECT count(*) FROM outbox WHERE event_type = %s", state) == 1


def test_copies_with_a_cascade(engine: sqlalchemy.Engine) -> None:
    """Guards against a copy of a child that loses the child's events."""
    order = Order(lines=[Line()])
    order.lines[0].record("e", {})
    with orm.Session(engine) as session:
        for copy in (
            lambda: session.merge(order),
            lambda: session.merge(instance=order),
            lambda: session.merge_all(instances=[order]),
        ):
            with pytest.raises(OutboxError, match=r"Line has recorded e, and session\.merge.*session\.add"):
                copy()
        with pytest.raises(orm.exc.UnmappedInstanceError):
            session.merge(object())
