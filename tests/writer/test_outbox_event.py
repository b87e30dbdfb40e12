"""Events as objects of SQLAlchemy's session."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

from outbox_pipelines.database import schema
from outbox_pipelines.writer import AutocommitError, OutboxError, PayloadTooLargeError, correlated, emit
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, OutboxEventMixin, outbox_table
from tests.schema.servers import Database
from tests.writer import targets


class Base(orm.DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    purchases: orm.Mapped[list[Purchase]] = orm.relationship(back_populates="customer")


class Purchase(Base):
    """Flushed after customers, and so in a later layer of the unit of work than an independent mapper."""

    __tablename__ = "purchases"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    customer_id: orm.Mapped[int] = orm.mapped_column(sqlalchemy.ForeignKey("customers.id"))
    customer: orm.Mapped[Customer] = orm.relationship(back_populates="purchases")


class BillingEvent(OutboxEventMixin, Base):
    __table__ = outbox_table(schema='Bill"ing %s')


@pytest.fixture
def engine(kept: Database) -> sqlalchemy.Engine:
    engine = targets.engine(kept)
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def session(engine: sqlalchemy.Engine) -> Iterator[orm.Session]:
    with orm.Session(engine) as session:
        yield session


@pytest.fixture
def order() -> str:
    return uuid.uuid4().hex


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


def types(database: Database, order: str) -> list[str]:
    """Types of the committed events of an order, by seq."""
    rows = database.rows("SELECT event_type FROM outbox WHERE aggregate_id = %s ORDER BY seq", order)
    return [name for (name,) in rows]


def test_it_is_there_after_the_flush(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an application that needs seq or id in its answer, and has neither, or loses both at the
    commit."""
    event = OutboxEvent("order", order, "order.placed", {"total": 5})
    session.add(event)
    session.flush()
    assert event.seq is not None
    assert types(kept, order) == []
    session.commit()
    [row] = kept.rows("SELECT id, seq, payload, version FROM outbox WHERE aggregate_id = %s", order)
    assert row == (event.id, event.seq, {"total": 5}, None)
    assert event.duplicate is False


def test_the_order_is_that_of_add(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against events sorted by which columns they have, by key, or by when they were made."""
    events = [
        OutboxEvent("order", order, str(n), {}, idempotency_key=f"{order} {9 - n}" if n % 2 else None)
        for n in range(10)
    ]
    for event in reversed(events):
        session.add(event)
    session.commit()
    assert types(kept, order) == [str(n) for n in reversed(range(10))]
    assert [event.seq for event in events] == sorted((event.seq or 0 for event in events), reverse=True)


def test_business_rows_come_first(session: orm.Session, statements: list[str], order: str) -> None:
    """Guards against a row lock that is taken after its event: transactions then commit in another order than
    their events."""
    session.add(OutboxEvent("order", order, "order.placed", {}))
    session.add(Purchase(customer=Customer()))
    session.commit()
    assert statements == ["INSERT INTO customers", "INSERT INTO purchases", "INSERT INTO outbox"]
    statements.clear()
    purchase = session.scalars(sqlalchemy.select(Purchase)).all()[-1]
    session.add(OutboxEvent("order", order, "order.cancelled", {}))
    session.delete(purchase)
    session.commit()
    assert statements[-2:] == ["DELETE FROM purchases", "INSERT INTO outbox"]


def test_many_go_in_one_round_trip(session: orm.Session, statements: list[str], order: str) -> None:
    """Guards against a round trip for each event, where the flush knows all of them."""
    session.add_all(OutboxEvent("order", order, str(n), {}) for n in range(100))
    session.commit()
    assert statements == ["SELECT id, seq"]


def test_what_is_emitted_keeps_its_place(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an event that was added first and comes second."""
    session.add(OutboxEvent("order", order, "added", {}))
    emit(session, "order", order, "emitted", {})
    session.add(OutboxEvent("order", order, "added again", {}))
    session.commit()
    assert types(kept, order) == ["added", "emitted", "added again"]


def test_nothing_is_written_twice(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an event that every further flush or commit of a long session writes again."""
    session.add(OutboxEvent("order", order, "e", {}))
    session.flush()
    session.flush()
    session.commit()
    session.add(Customer())
    session.commit()
    assert types(kept, order) == ["e"]


def test_a_rollback_takes_it_along(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an event of what was rolled back; written, or still waiting when the flush failed."""
    session.add(OutboxEvent("order", order, "flushed", {}))
    session.flush()
    session.add(OutboxEvent("order", order, "added", {}))
    session.rollback()
    session.add(OutboxEvent("order", order, "failed", {}))
    session.add(Purchase(customer_id=-1))
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        session.flush()
    session.rollback()
    session.add(Customer())
    session.commit()
    assert types(kept, order) == []


def test_savepoints(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an event that survives its savepoint, or is lost with another one's."""
    session.add(OutboxEvent("order", order, "before", {}))
    with session.begin_nested():
        session.add(OutboxEvent("order", order, "released", {}))
    nested = session.begin_nested()
    session.add(OutboxEvent("order", order, "rolled back", {}))
    session.flush()
    nested.rollback()
    session.add(OutboxEvent("order", order, "after", {}))
    session.commit()
    assert types(kept, order) == ["before", "released", "after"]


def test_a_failed_savepoint(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an event of refused rows, written by the next flush of the outer transaction."""
    savepoint = session.begin_nested()
    session.add(OutboxEvent("order", order, "e", {}))
    session.add(Purchase(customer_id=-1))
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        session.flush()
    savepoint.rollback()
    session.add(Customer())
    session.commit()
    assert types(kept, order) == []


def test_after_a_rollback_it_can_be_added_again(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against a second attempt with the same objects that writes the rows and no event."""
    event = OutboxEvent("order", order, "e", {})
    session.add(event)
    session.flush()
    first = event.seq
    session.rollback()
    session.add(event)
    session.commit()
    assert types(kept, order) == ["e"]
    assert event.seq != first


def test_a_listener_that_fails_loses_nothing(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against rows committed without their event, because another listener refused the first flush."""
    refuse_first_flush(session)
    session.add(Customer())
    session.add(OutboxEvent("order", order, "e", {}))
    with pytest.raises(LookupError):
        session.flush()
    session.commit()
    assert types(kept, order) == ["e"]


def test_a_session_that_is_closed_forgets(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an event of a request that failed, written by the next one that has the session."""
    refuse_first_flush(session)
    session.add(OutboxEvent("order", order, "e", {}))
    with pytest.raises(LookupError):
        session.flush()
    session.close()
    session.add(Customer())
    session.commit()
    assert types(kept, order) == []
    assert session.info == {}


def refuse_first_flush(session: orm.Session) -> None:
    def refuse(*arguments: object) -> None:
        sqlalchemy.event.remove(session, "before_flush", refuse)
        raise LookupError

    sqlalchemy.event.listen(session, "before_flush", refuse)


def test_only_an_orphan_beside_it(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against a flush that has no work for SQLAlchemy, and so never comes to its end."""

    @sqlalchemy.event.listens_for(session, "before_flush")
    def drop(session: orm.Session, *rest: object) -> None:
        for one in list(session.new):
            session.expunge(one)

    session.add(Customer())
    session.add(OutboxEvent("order", order, "e", {}))
    session.commit()
    assert types(kept, order) == ["e"]


def test_known_keys_are_reported(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against an IntegrityError that aborts the transaction of a request that was only sent again."""
    events = [OutboxEvent("order", order, str(n), {}, idempotency_key=order) for n in range(2)]
    session.add_all(events)
    session.commit()
    again = OutboxEvent("order", order, "2", {}, idempotency_key=order)
    session.add(again)
    session.commit()
    assert [event.duplicate for event in (*events, again)] == [False, True, True]
    assert (again.id, again.seq) == (events[0].id, None)
    assert types(kept, order) == ["0"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "NUL": ({"payload": "a\0b"}, "NUL character"),
    "NaN": ({"payload": float("nan")}, "does not serialize"),
    "size": ({"payload": "x" * 1_000_001}, "more than 1,000,000"),
    "name": ({"aggregate_type": ""}, "aggregate_type is empty"),
    "id": ({"aggregate_id": None}, r"session\.flush"),
    "key": ({"idempotency_key": ""}, "idempotency_key is empty"),
    "trace": ({"traceparent": "00-1-2-3"}, "W3C"),
    "version": ({"version": 2**31}, "32 bits"),
}


@pytest.mark.parametrize(("arguments", "why"), WRONG.values(), ids=list(WRONG))
def test_content_is_checked_where_it_is_made(arguments: dict[str, Any], why: str) -> None:
    """Guards against an error of the database at a commit, far from the line that made the mistake."""
    given: dict[str, Any] = {
        "aggregate_type": "order",
        "aggregate_id": 1,
        "event_type": "e",
        "payload": {},
        **arguments,
    }
    with pytest.raises(OutboxError, match=why):
        OutboxEvent(**given)


# SQLAlchemy says it of each table whose keys the database makes.
@pytest.mark.filterwarnings("ignore:Column 'outbox:sqlalchemy.exc.SAWarning")
def test_merged_or_in_bulk(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against a copy without content, and rows past all checks: an AttributeError, or an event before
    its rows."""
    with pytest.raises(OutboxError, match=r"session\.merge.*session\.add"):
        session.merge(OutboxEvent("order", order, "e", {}))
    for write in (
        lambda: session.bulk_save_objects([OutboxEvent("order", order, "e", {})]),
        lambda: session.execute(sqlalchemy.insert(OutboxEvent).values(aggregate_type="order")),
    ):
        with pytest.raises(
            (OutboxError, sqlalchemy.exc.StatementError), match=r"bulk_save_objects.*session\.add"
        ):
            write()
        session.rollback()
    assert types(kept, order) == []


def test_what_only_the_database_counts(session: orm.Session) -> None:
    """Guards against a refusal of the size that is an error of the driver here, and ours in `emit`."""
    session.add(Customer())
    session.add(OutboxEvent("order", 1, "e", [1e300] * 50_000))
    with pytest.raises(PayloadTooLargeError):
        session.flush()


def test_what_surrounds_its_making(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against the ids of the code that commits, and against no ids."""
    with correlated(correlation_id="request"):
        event = OutboxEvent("order", order, "e", {})
    with correlated(correlation_id="another"):
        session.add(event)
        session.commit()
    assert event.correlation_id == "request"
    assert kept.value("SELECT correlation_id FROM outbox WHERE aggregate_id = %s", order) == "request"


def test_the_content_is_that_of_its_making(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against a change that is not checked, or seems to be made and is not sent."""
    body: dict[str, object] = {"total": 5}
    event = OutboxEvent("order", order, "e", body, headers={"a": uuid.UUID(int=0)})
    body["total"] = object()
    with pytest.raises(OutboxError, match="payload of an outbox event cannot be changed"):
        event.payload = {}
    session.add(event)
    session.commit()
    assert event.payload == {"total": 5}
    assert event.headers == {"a": str(uuid.UUID(int=0))}


def test_autocommit_is_refused(kept: Database, order: str) -> None:
    """Guards against rows committed by the very flush that refuses the event."""
    engine = targets.engine(kept, isolation_level="AUTOCOMMIT")
    before = kept.value("SELECT count(*) FROM customers") if _has_customers(kept) else None
    with orm.Session(engine) as session:
        session.add(Customer())
        session.add(OutboxEvent("order", order, "e", {}))
        with pytest.raises(AutocommitError):
            session.commit()
        session.rollback()
    assert types(kept, order) == []
    assert before is None or kept.value("SELECT count(*) FROM customers") == before


def _has_customers(database: Database) -> bool:
    return bool(database.value("SELECT to_regclass('customers') IS NOT NULL"))


def test_another_database_is_refused() -> None:
    """Guards against a table `outbox` of SQLite in the unit tests of an application."""
    with orm.Session(sqlalchemy.create_engine("sqlite://")) as session:
        session.add(OutboxEvent("order", 1, "e", {}))
        with pytest.raises(OutboxError, match=r"sqlite.*PostgreSQL"):
            session.flush()


def test_too_late_in_the_flush(session: orm.Session) -> None:
    """Guards against an event that a listener adds, and that SQLAlchemy's own INSERT puts before the rows."""

    @sqlalchemy.event.listens_for(session, "before_flush")
    def audit(session: orm.Session, *rest: object) -> None:
        session.add(OutboxEvent("order", 1, "audited", {}))

    session.add(Customer())
    with pytest.raises(OutboxError, match="insert=True"):
        session.flush()


def test_a_listener_in_time(session: orm.Session, kept: Database, order: str) -> None:
    """Guards against advice that does not help."""

    @sqlalchemy.event.listens_for(orm.Session, "before_flush", insert=True)
    def audit(flushed: orm.Session, *rest: object) -> None:
        if flushed is session and any(isinstance(one, Customer) for one in flushed.new):
            flushed.add(OutboxEvent("order", order, "audited", {}))

    try:
        session.add(Customer())
        session.commit()
    finally:
        sqlalchemy.event.remove(orm.Session, "before_flush", audit)
    assert types(kept, order) == ["audited"]


def test_it_can_be_selected(session: orm.Session, order: str) -> None:
    """Guards against a model that writes rows it cannot read."""
    session.add(OutboxEvent("order", order, "e", {"total": 5}, headers={"a": 1}, version=3))
    session.flush()
    found = session.scalars(sqlalchemy.select(OutboxEvent).where(OutboxEvent.aggregate_id == order)).one()
    assert (found.payload, found.headers, found.version) == ({"total": 5}, {"a": 1}, 3)
    assert found.created_at.tzinfo is not None
    with pytest.raises(OutboxError, match="cannot be changed"):
        found.version = 4


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_asynchronous_sessions(kept: Database, engine: sqlalchemy.Engine, driver: str, order: str) -> None:
    """Guards against attributes that would have to be loaded, and cannot outside of an `await`."""

    async def write() -> OutboxEvent:
        async with sqlalchemy_asyncio.AsyncSession(targets.async_engine(driver, kept)) as session:
            session.add(Purchase(customer=Customer()))
            event = OutboxEvent("order", order, "e", {"total": 5})
            session.add(event)
            await session.commit()
            return event

    event = asyncio.run(write())
    assert kept.value("SELECT seq FROM outbox WHERE aggregate_id = %s", order) == event.seq


def test_a_model_of_ones_own_in_another_schema(empty: Database) -> None:
    """Guards against a schema that is quoted wrongly, or ignored; two outboxes whose connections differ."""
    there = empty.settings.model_copy(update={"db_schema": 'Bill"ing %s'})
    schema.migrate(there)
    for driver in ("psycopg", "asyncpg"):

        async def write(driver: str = driver) -> BillingEvent:
            engine = targets.async_engine(driver, empty)
            async with sqlalchemy_asyncio.AsyncSession(binds={Base: engine}) as session, session.begin():
                event = BillingEvent("bill", 1, "bill.sent", {"%s": "$1"})
                session.add(event)
            return event

        assert asyncio.run(write()).seq is not None
    found = empty.rows('SELECT payload FROM "Bill""ing %%s".outbox WHERE %s', True)
    assert found == [({"%s": "$1"},)] * 2


def test_it_is_in_no_metadata(empty: Database) -> None:
    """Guards against `create_all` that makes a table without guards; `drop_all` that drops the outbox."""
    assert "outbox" not in Base.metadata.tables
    Base.metadata.create_all(targets.engine(empty))
    assert empty.value("SELECT to_regclass('outbox') IS NULL")
    assert OutboxEvent.metadata.tables == {}


def test_the_rights_of_a_writer_suffice(kept: Database, order: str) -> None:
    """Guards against a RETURNING, or a refresh, that needs to read what an application may not."""
    role = kept.role()
    kept.rows("SELECT outbox_grant_writer(%s)", role)
    dsn = psycopg.conninfo.make_conninfo(kept.dsn, user=role)
    theirs = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=sqlalchemy.NullPool
    )
    with orm.Session(theirs) as session, session.begin():
        event = OutboxEvent("order", order, "e", {}, idempotency_key=order)
        session.add(event)
    assert (event.seq is not None, event.event_type) == (True, "e")
