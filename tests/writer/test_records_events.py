"""Rows of SQLAlchemy that record what happened to them."""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

from outbox_pipelines.writer import AutocommitError, OutboxError, correlated
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, RecordsEvents
from tests.schema.servers import Database
from tests.writer import targets


class Base(orm.DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "recorded_orders"
    __aggregate_type__ = "recorded"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str] = orm.mapped_column(default="new")

    def become(self, state: str) -> None:
        self.state = state
        self.record(state, {"state": state})


class Leg(RecordsEvents, Base):
    __tablename__ = "recorded_legs"
    __aggregate_type__ = "leg"

    order_id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    number: orm.Mapped[int] = orm.mapped_column(primary_key=True)


@pytest.fixture
def engine(database: Database) -> sqlalchemy.Engine:
    engine = targets.engine(database)
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def session(engine: sqlalchemy.Engine) -> Iterator[orm.Session]:
    with orm.Session(engine) as session:
        yield session


@pytest.fixture
def order(session: orm.Session) -> Order:
    """An order that is committed, and has recorded nothing."""
    order = Order()
    session.add(order)
    session.commit()
    return order


def types(database: Database) -> list[str]:
    """Types of the committed events, by seq."""
    return [name for (name,) in database.rows("SELECT event_type FROM outbox ORDER BY seq")]


def test_an_id_that_the_flush_draws(session: orm.Session, database: Database) -> None:
    """Guards against an event of the order 'None', or a flush by hand in every method that records."""
    order = Order()
    order.become("placed")
    session.add(order)
    session.commit()
    assert database.rows("SELECT aggregate_type, aggregate_id, event_type, payload FROM outbox") == [
        ("recorded", str(order.id), "placed", {"state": "placed"})
    ]


def test_nothing_is_written_twice(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against an event that every further flush or commit of a long session writes again."""
    order.become("placed")
    session.flush()
    session.flush()
    session.commit()
    order.state = "seen"
    session.commit()
    assert types(database) == ["placed"]


def test_a_long_session_keeps_nothing(session: orm.Session, order: Order) -> None:
    """Guards against aggregates that a worker keeps for weeks, for rollbacks that can no longer come."""
    order.become("placed")
    session.commit()
    assert session.info == {}


@pytest.mark.extended
def test_without_a_changed_column(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against an event of an object that the session does not flush and no longer references."""
    order.record("viewed", {})
    del order
    gc.collect()
    session.commit()
    assert types(database) == ["viewed"]


def test_of_a_row_that_is_deleted(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against the last event of an aggregate, lost."""
    order.record("deleted", {})
    session.delete(order)
    session.commit()
    assert types(database) == ["deleted"]


def test_the_order_is_that_of_record(session: orm.Session, database: Database) -> None:
    """Guards against events sorted by object, or by the session's sets."""
    orders = [Order() for _ in range(5)]
    session.add_all(orders)
    session.commit()
    for name in "abc":
        for number, order in enumerate(reversed(orders)):
            order.record(f"{name}{number}", {})
    session.add(OutboxEvent("order", 1, "added", {}))
    session.commit()
    assert types(database) == ["added", *(f"{name}{number}" for name in "abc" for number in range(5))]


def test_rows_come_first(session: orm.Session, order: Order, engine: sqlalchemy.Engine) -> None:
    """Guards against a row lock that is taken after its event: transactions then commit in another order than
    their events."""
    order.become("placed")
    sent: list[str] = []
    sqlalchemy.event.listen(
        engine,
        "before_cursor_execute",
        lambda conn, cursor, statement, *rest: sent.append(statement.split()[0]),
    )
    session.commit()
    assert sent[-2:] == ["UPDATE", "INSERT"]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_rollback_forgets_it(session: orm.Session, order: Order, database: Database, flushed: bool) -> None:
    """Guards against a change that was rolled back, emitted by the next commit that touches the object."""
    order.become("placed")
    if flushed:
        session.flush()
    session.rollback()
    order.become("cancelled")
    session.commit()
    assert types(database) == ["cancelled"]


def test_a_failed_flush_forgets_it(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against the same if the database refused another row of the flush."""
    order.become("placed")
    # Past the identity map, so that the database refuses it.
    session.add(Leg(order_id=1, number=1))
    with orm.Session(session.get_bind()) as other, other.begin():
        other.add(Leg(order_id=1, number=1))
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        session.flush()
    session.rollback()
    order.become("cancelled")
    session.commit()
    assert types(database) == ["cancelled"]


def test_savepoints(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against an event that survives its savepoint, or is lost with another one's."""
    order.become("before")
    with session.begin_nested():
        order.become("released")
    nested = session.begin_nested()
    order.become("flushed")
    session.flush()
    order.become("recorded")
    nested.rollback()
    order.become("after")
    session.commit()
    assert types(database) == ["before", "released", "after"]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_new_object_keeps_its_events(session: orm.Session, database: Database, flushed: bool) -> None:
    """Guards against a second attempt with the same object that inserts the row and writes no event."""
    order = Order()
    order.become("placed")
    session.add(order)
    if flushed:
        session.flush()
    order.become("paid")
    session.rollback()
    session.add(order)
    session.commit()
    assert (order.state, types(database)) == ("paid", ["placed", "paid"])


def test_a_new_object_without_its_savepoints_events(session: orm.Session, database: Database) -> None:
    """Guards against a second attempt that emits a change which a savepoint took back."""
    order = Order()
    order.become("placed")
    session.add(order)
    session.flush()
    outer = session.begin_nested()
    with session.begin_nested():
        order.become("paid")
    outer.rollback()
    assert order.state == "placed"
    session.rollback()
    session.add(order)
    session.commit()
    assert types(database) == ["placed"]


def test_known_keys_are_passed_over(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against an IntegrityError that aborts the transaction."""
    for _ in range(2):
        order.record("placed", {}, idempotency_key="k")
    session.commit()
    order.record("placed", {}, idempotency_key="k")
    order.record("paid", {})
    session.commit()
    assert types(database) == ["placed", "paid"]


def test_content_is_checked_where_it_is_recorded(order: Order) -> None:
    """Guards against an error at a commit, far from the line that made the mistake."""
    for payload, name in [(float("nan"), "e"), ("a\0b", "e"), ({}, "")]:
        with pytest.raises(OutboxError):
            order.record(name, payload)
    held = sqlalchemy.inspect(order).session
    assert held is not None
    assert order not in held.dirty


def test_what_surrounds_the_recording(session: orm.Session, order: Order, database: Database) -> None:
    """Guards against the ids of the code that commits, and against no ids."""
    with correlated(correlation_id="request"):
        order.become("placed")
    session.commit()
    assert database.rows("SELECT correlation_id FROM outbox") == [("request",)]


def test_a_class_without_an_aggregate_type() -> None:
    """Guards against a topic called '-events'."""

    class Nameless(RecordsEvents, Base):
        __tablename__ = "nameless"
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)

    with pytest.raises(OutboxError, match="aggregate_type is empty"):
        Nameless().record("e", {})


def test_a_key_of_two_columns(session: orm.Session) -> None:
    """Guards against half of a key, or the text of a tuple, as a key in Kafka."""
    leg = Leg(order_id=uuid.uuid4().int % 2**31, number=1)
    leg.record("e", {})
    session.add(leg)
    with pytest.raises(OutboxError, match="2 columns: override outbox_aggregate_id"):
        session.flush()


def test_autocommit_is_refused(database: Database, engine: sqlalchemy.Engine) -> None:
    """Guards against rows committed by the very flush that refuses their events."""
    with orm.Session(targets.engine(database, isolation_level="AUTOCOMMIT")) as session:
        order = Order()
        order.become("placed")
        session.add(order)
        with pytest.raises(AutocommitError):
            session.commit()
        session.rollback()
    assert database.value("SELECT count(*) FROM recorded_orders") == 0


def test_asynchronous_sessions(database: Database, engine: sqlalchemy.Engine) -> None:
    """Guards against a hook that blocks the event loop, or that is only there for `Session`."""

    async def write() -> None:
        async with sqlalchemy_asyncio.AsyncSession(targets.async_engine("asyncpg", database)) as session:
            order = Order()
            order.become("placed")
            session.add(order)
            await session.commit()

    asyncio.run(write())
    assert types(database) == ["placed"]
