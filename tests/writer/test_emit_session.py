"""With SQLAlchemy's unit of work: the business rows come first."""

from __future__ import annotations

import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.writer import OutboxError, emit
from tests.schema.servers import Database
from tests.writer import targets


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str]


@pytest.fixture
def engine(kept: Database) -> sqlalchemy.Engine:
    engine = targets.engine(kept)
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def old(engine: sqlalchemy.Engine) -> int:
    """The id of an order that is there."""
    with orm.Session(engine) as session, session.begin():
        order = Order(state="new")
        session.add(order)
        session.flush()
        return order.id


@pytest.fixture
def statements(engine: sqlalchemy.Engine) -> list[str]:
    """What is sent, in order: the first three words of each."""
    sent: list[str] = []
    sqlalchemy.event.listen(
        engine,
        "before_cursor_execute",
        lambda conn, cursor, statement, *rest: sent.append(" ".join(statement.split()[:3])),
    )
    return sent


@pytest.mark.parametrize("autoflush", [True, False])
@pytest.mark.parametrize("with_key", [True, False])
def test_the_business_rows_come_first(
    engine: sqlalchemy.Engine, old: int, statements: list[str], autoflush: bool, with_key: bool
) -> None:
    """Guards against a row lock taken after the event: transactions and events would differ in order."""
    key = f"key {old}" if with_key else None
    with orm.Session(engine, autoflush=autoflush) as session, session.begin():
        order = session.get_one(Order, old)
        statements.clear()
        order.state = "placed"
        session.add(Order(state="new"))
        emit(session, "order", order.id, "order.placed", {}, idempotency_key=key)
    assert sorted(statements[:-1]) == ["INSERT INTO orders", "UPDATE orders SET"]
    assert statements[-1] == ("SELECT id, seq," if key else "INSERT INTO outbox")


def test_an_id_that_the_database_has_not_drawn_yet(engine: sqlalchemy.Engine) -> None:
    """Guards against an event of the order 'None': `order.id` is None before the flush."""
    with orm.Session(engine) as session, session.begin():
        order = Order(state="new")
        session.add(order)
        with pytest.raises(OutboxError, match=r"aggregate_id is None.*flush"):
            emit(session, "order", order.id, "order.placed", {})
        session.flush()
        emit(session, "order", order.id, "order.placed", {})


def test_a_failed_flush_writes_no_event(engine: sqlalchemy.Engine, old: int, kept: Database) -> None:
    """Guards against an event of a row that the database has refused."""
    with orm.Session(engine) as session:
        session.add(Order(id=old, state="again"))
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            emit(session, "order", old, "order.placed", {})
        session.rollback()
    assert kept.value("SELECT count(*) FROM outbox WHERE aggregate_id = %s", str(old)) == 0
