"""Sessions of SQLAlchemy whose rows and events are in two databases, and calls within a flush."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.writer import OutboxError, emit
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, RecordsEvents
from tests.schema.servers import Database
from tests.writer import targets


class Base(orm.DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "split_orders"
    __aggregate_type__ = "order"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str] = orm.mapped_column(default="new")


@pytest.fixture
def engines(shared: Database, empty: Database) -> Iterator[tuple[sqlalchemy.Engine, sqlalchemy.Engine]]:
    """The outbox's and another database's, both with orders."""
    both = (targets.engine(shared), targets.engine(empty))
    for engine in both:
        Base.metadata.create_all(engine)
    yield both
    Base.metadata.drop_all(both[0])


def session(outbox: sqlalchemy.Engine, orders: sqlalchemy.Engine, **options: Any) -> Any:
    return orm.Session(outbox, binds={Order: orders}, **options)


@pytest.mark.parametrize("flushed", [True, False])
def test_rows_in_another_database(
    engines: tuple[sqlalchemy.Engine, sqlalchemy.Engine], flushed: bool
) -> None:
    """Guards against an order in one database and its event in another: two commits."""
    with session(*engines) as split:
        writes: tuple[Callable[[], object], ...] = (
            lambda: emit(split, "order", 1, "order.placed", {}),
            lambda: split.add(OutboxEvent("order", 1, "order.placed", {})) or split.commit(),
        )
        for write in writes:
            split.add(Order())
            if flushed:
                split.flush()
            with pytest.raises(OutboxError, match=r"written to two databases, .* commit separately"):
                write()
            split.rollback()


@pytest.mark.parametrize("flushed", [True, False])
def test_rows_in_another_database_after_the_event(
    engines: tuple[sqlalchemy.Engine, sqlalchemy.Engine], shared: Database, flushed: bool
) -> None:
    """Guards against the same where the event is first; a transaction without events is not refused."""
    with session(*engines) as split:
        emit(split, "order", 1, "order.placed", {})
        split.add(Order())
        if flushed:
            split.flush()
        with pytest.raises(OutboxError, match=r"written to two databases, .* commit separately"):
            split.commit()
        split.rollback()
        split.add(Order())
        split.commit()


def test_rows_that_are_only_read(
    engines: tuple[sqlalchemy.Engine, sqlalchemy.Engine], shared: Database
) -> None:
    """Guards against a refusal where the other database is only read; events with their rows."""
    with session(*engines) as split:
        assert split.scalars(sqlalchemy.select(Order)).all() == []
        emit(split, "order", 1, "order.placed", {})
        split.add(OutboxEvent("order", 1, "order.paid", {}))
        split.flush()
        assert split.scalar(sqlalchemy.text("SELECT count(*) FROM outbox")) == 2
        split.rollback()
    with session(engines[1], engines[0]) as split:
        order = Order()
        order.record("order.placed", {})
        split.add(order)
        split.flush()
        connection = split.connection(bind_arguments={"mapper": Order})
        assert emit(connection, "order", order.id, "order.paid", {}).seq is not None
        split.rollback()


def test_a_session_with_binds_alone(engines: tuple[sqlalchemy.Engine, sqlalchemy.Engine]) -> None:
    """Guards against SQLAlchemy's error about a bind, which does not say what to pass to `emit`."""
    with orm.Session(binds={Order: engines[0]}) as bound:
        with pytest.raises(
            OutboxError, match=r"only binds: call session\.flush\(\), then emit\(session\.connection"
        ):
            emit(bound, "order", 1, "order.placed", {})
        order = Order()
        bound.add(order)
        bound.flush()
        emit(bound.connection(bind_arguments={"mapper": Order}), "order", order.id, "order.placed", {})
        bound.rollback()


@pytest.mark.parametrize("name", ["before_flush", "after_flush"])
def test_emit_in_a_listener(engines: tuple[sqlalchemy.Engine, sqlalchemy.Engine], name: str) -> None:
    """Guards against SQLAlchemy's "Session is already flushing", and against advice that does not help."""
    with orm.Session(engines[0]) as flushed:

        def wrong(session: orm.Session, *_: object) -> None:
            emit(session, "order", 1, "order.placed", {})

        sqlalchemy.event.listen(flushed, name, wrong)
        flushed.add(Order())
        with pytest.raises(OutboxError, match=r"listener of the session's flush.*session\.connection\(\)"):
            flushed.flush()
        flushed.rollback()
        sqlalchemy.event.remove(flushed, name, wrong)
        sqlalchemy.event.listen(
            flushed,
            "after_flush",
            lambda session, _: emit(session.connection(), "order", 1, "order.placed", {}),
        )
        flushed.add(Order())
        flushed.flush()
        assert flushed.scalar(sqlalchemy.text("SELECT count(*) FROM outbox")) == 1
        flushed.rollback()


@pytest.mark.parametrize("ends", ["flush", "commit"])
def test_an_event_recorded_after_the_flush_has_written(shared: Database, ends: str) -> None:
    """Guards against an event that is lost in silence; the session is as before after a rollback."""
    engine = targets.engine(shared)
    Base.metadata.create_all(engine)
    with orm.Session(engine) as bound:
        order = Order()
        bound.add(order)
        late = lambda *_: order.record("order.late", {})  # noqa: E731 - to be removed again
        sqlalchemy.event.listen(bound, "after_flush", late)
        with pytest.raises(OutboxError, match=r"order\.late was recorded in an after_flush listener"):
            getattr(bound, ends)()
        sqlalchemy.event.remove(bound, "after_flush", late)
        bound.rollback()
        bound.add(order)
        order.record("order.placed", {})
        bound.flush()
        order.record("order.paid", {})
        bound.flush()
        found = bound.scalars(sqlalchemy.text("SELECT event_type FROM outbox ORDER BY seq")).all()
        assert found == ["order.placed", "order.paid"]
        bound.rollback()
    Base.metadata.drop_all(engine)


def test_a_flush_of_some_objects(shared: Database) -> None:
    """Guards against events that are written before their rows, and stay if the rows are then discarded."""
    engine = targets.engine(shared)
    Base.metadata.create_all(engine)
    with orm.Session(engine) as bound:
        one, other = Order(), Order()
        bound.add_all([one, other])
        other.record("order.placed", {})
        with (
            pytest.warns(sqlalchemy.exc.SADeprecationWarning),
            pytest.raises(
                OutboxError, match=r"given a part of the objects, and Order, which is none of them"
            ),
        ):
            bound.flush([one])
        bound.rollback()
    Base.metadata.drop_all(engine)
