"""What writers and readers of the table's name see after the switch, and after the way back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects.postgresql import JSONB

from outbox_pipelines.writer import emit
from tests.existing import guides
from tests.existing.adopt.conftest import SCHEMA, Adopted, Make

KEY = "00000000-0000-0000-0000-000000000001"
BARE = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload"


def _switched(make: Make, guide: guides.Guide = guides.A, **given: Any) -> Adopted:
    adopted = make(guide, **given)
    adopted.run("adopt", "prepare")
    adopted.switch()
    return adopted


def _insert(connection: psycopg.Connection[Any], **more: Any) -> tuple[Any, ...]:
    columns = {"aggregate_type": "Order", "aggregate_id": KEY, "event_type": "order.created", "payload": "{}"}
    columns |= more
    row: tuple[Any, ...] | None = connection.execute(
        f"INSERT INTO outbox ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))}) "
        "RETURNING id::text, created_at, published_at, retry_count".encode(),
        list(columns.values()),
    ).fetchone()
    assert row is not None
    return row


class Base(orm.DeclarativeBase):
    pass


class Outbox(Base):
    """The model of guide A."""

    __tablename__ = "outbox"
    id: orm.Mapped[uuid.UUID] = orm.mapped_column(primary_key=True, default=uuid.uuid4)
    aggregate_type: orm.Mapped[str]
    aggregate_id: orm.Mapped[uuid.UUID]
    event_type: orm.Mapped[str]
    payload: orm.Mapped[dict[str, Any]] = orm.mapped_column(JSONB)
    idempotency_key: orm.Mapped[str | None]
    created_at: orm.Mapped[datetime] = orm.mapped_column(server_default=sa.func.now())
    published_at: orm.Mapped[datetime | None]
    retry_count: orm.Mapped[int] = orm.mapped_column(server_default=sa.text("0"))


@pytest.mark.extended
def test_an_orm_model(make: Make) -> None:
    """Guards against a model that can no longer flush, refresh or query."""
    adopted = make(guides.A)
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=adopted.connect_to_write, poolclass=sa.NullPool
    )
    for n, prepare in enumerate((lambda: adopted.run("adopt", "prepare"), adopted.switch, adopted.drain)):
        prepare()
        with orm.Session(engine, expire_on_commit=True) as session:
            event = Outbox(
                aggregate_type="Order", aggregate_id=uuid.UUID(KEY), event_type="x", payload={"n": n}
            )
            event.idempotency_key = f"key {n}"
            session.add(event)
            session.commit()
            # Read again.
            assert (event.payload, event.retry_count, event.published_at) == ({"n": n}, 0, None)
            found = session.scalars(sa.select(Outbox).where(Outbox.idempotency_key == f"key {n}")).one()
            assert found is event
            assert session.scalar(sa.select(sa.func.count()).select_from(Outbox)) == n + 1
    engine.dispose()
    adopted.relay()
    assert adopted.numbers() == {KEY: [0, 1, 2]}


@pytest.mark.extended
def test_a_running_session_and_its_prepared_statements(make: Make) -> None:
    """Guards against "cached plan must not change result type"."""
    adopted = make(guides.A)
    with adopted.connect() as connection:
        connection.prepare_threshold = 0
        for step in ("prepare", "switch", "drain", "back"):
            _insert(connection)
            assert connection.execute("SELECT * FROM outbox ORDER BY created_at LIMIT 1").fetchone()
            adopted.run("adopt", step)
        _insert(connection)


def test_an_event_that_waits_for_a_delayed_one(make: Make) -> None:
    """Guards against a NULL where the table had a time, and a way back whose rows wait for delayed events."""
    adopted = _switched(make)
    adopted.drain()
    with adopted.connect() as connection:
        connection.execute(
            f"SELECT {SCHEMA}.outbox_emit('Order', %s, 'held', '{{}}', later_events_wait => true, "
            "deliver_after => now() + interval '1 hour')".encode(),
            [KEY],
        )
        assert _insert(connection)[1] is not None
        assert connection.execute(f"SELECT count(*) FROM {SCHEMA}.outbox".encode()).fetchone() == (0,)
        code, why = adopted.refuse("adopt", "back")
        assert (code, adopted.state()) == (1, "adopted")
        assert "2 delayed events" in why
        connection.execute(f"SELECT {SCHEMA}.outbox_cancel(id) FROM {SCHEMA}.outbox_delayed".encode())
    adopted.run("adopt", "back")


def test_defaults_and_what_the_database_decides(make: Make) -> None:
    """Guards against RETURNING that says something else than a later SELECT."""
    adopted = _switched(make)
    given = str(uuid.uuid4())
    with adopted.connect() as connection:
        made = _insert(connection)
        assert made[2:] == (None, 0)
        mine = _insert(connection, id=given, created_at=datetime(2020, 1, 1, tzinfo=UTC))
        assert mine[0] == given
        assert mine[1].year > 2020
        for row in (made, mine):
            query = "SELECT id::text, created_at, published_at, retry_count FROM outbox WHERE id = %s"
            assert connection.execute(query, [row[0]]).fetchone() == row


@pytest.mark.extended
def test_marks_are_what_the_relay_did(make: Make) -> None:
    """Guards against dashboards that count everything as pending."""
    adopted = _switched(make)
    adopted.write((KEY, 1), (KEY, 2))
    with adopted.connect() as connection:
        query = b"SELECT count(*), count(published_at) FROM outbox"
        assert connection.execute(query).fetchone() == (2, 0)
        adopted.relay()
        assert connection.execute(query).fetchone() == (2, 2)


def test_keys_count_on_both_sides(make: Make) -> None:
    """Guards G5 for writers: a key of the old table is taken in the new one, and the other way round."""
    adopted = make(guides.A)
    with adopted.connect() as connection:
        _insert(connection, idempotency_key="old")
        adopted.run("adopt", "prepare")
        adopted.switch()
        taken = pytest.raises(psycopg.errors.UniqueViolation)
        with taken:
            _insert(connection, idempotency_key="old")
        _insert(connection, idempotency_key="new")
        with pytest.raises(psycopg.errors.UniqueViolation):
            _insert(connection, idempotency_key="new")
        adopted.drain()
        connection.execute("SET search_path = box")
        connection.autocommit = False
        assert emit(connection, "Order", "1", "x", {}, idempotency_key="old").duplicate
        assert emit(connection, "Order", "1", "x", {}, idempotency_key="new").duplicate
        connection.rollback()
        connection.autocommit = True
        connection.execute("SET search_path = public")
        adopted.back()
        for key in ("old", "new"):
            with pytest.raises(psycopg.errors.UniqueViolation):
                _insert(connection, idempotency_key=key)
        _insert(connection, idempotency_key="newer")


@pytest.mark.extended
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_keys_in_a_transaction_that_reads_as_of_before(make: Make, level: str) -> None:
    """Guards against a key that is taken twice, once on each side of the switch."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")

    def snapshot() -> psycopg.Connection[Any]:
        session = adopted.connect_to_write()
        session.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        session.execute("SELECT count(*) FROM pg_class")
        return session

    def insert(key: str) -> None:
        with adopted.connect() as connection:
            _insert(connection, idempotency_key=key)

    with snapshot() as session:
        insert("before")
        adopted.switch()
        with pytest.raises(psycopg.errors.SerializationFailure, match="during the transaction"):
            _insert(session, idempotency_key="before")
    with snapshot() as session:
        _insert(session, idempotency_key="a transaction after the switch")
    adopted.drain()
    with snapshot() as session:
        insert("after")
        adopted.back()
        with pytest.raises(psycopg.errors.SerializationFailure, match="during the transaction"):
            _insert(session, idempotency_key="after")
    with snapshot() as session:
        _insert(session, idempotency_key="a transaction after the way back")


def test_the_same_id_as_an_old_row(make: Make) -> None:
    """Guards against a retry of before the switch that becomes a second event."""
    adopted = make(guides.A)
    with adopted.connect() as connection:
        old = _insert(connection)[0]
        adopted.run("adopt", "prepare")
        adopted.switch()
        with pytest.raises(psycopg.errors.UniqueViolation):
            _insert(connection, id=old)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"payload": None}, psycopg.errors.NotNullViolation, "payload"),
        ({"aggregate_type": "x" * 101}, psycopg.errors.StringDataRightTruncation, "100"),
        ({"event_type": "forbidden"}, psycopg.errors.CheckViolation, "not_forbidden"),
        ({"published_at": datetime(2026, 1, 1, tzinfo=UTC)}, psycopg.errors.CheckViolation, "is pending"),
        ({"aggregate_id": "1"}, psycopg.errors.InvalidTextRepresentation, "uuid"),
    ],
)
def test_what_the_table_refused(
    make: Make, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Guards against a view that takes what the table did not take."""
    ddl: Callable[[str], str] = lambda ddl: (  # noqa: E731
        f"{ddl}; ALTER TABLE outbox ADD CONSTRAINT not_forbidden CHECK (event_type <> 'forbidden')"
    )
    adopted = _switched(make, ddl=ddl)
    with adopted.connect() as connection, pytest.raises(error, match=words):
        _insert(connection, **change)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("UPDATE outbox SET published_at = now()", psycopg.errors.FeatureNotSupported),
        ("DELETE FROM outbox WHERE published_at < now()", psycopg.errors.FeatureNotSupported),
        ("TRUNCATE outbox", psycopg.errors.WrongObjectType),
        (f"{BARE}) VALUES ('a', '{KEY}', 'c', '{{}}') ON CONFLICT (id) DO NOTHING", psycopg.errors.Error),
        (
            f"{BARE}, idempotency_key) VALUES ('a', '{KEY}', 'c', '{{}}', 'k') ON CONFLICT DO NOTHING",
            psycopg.errors.UniqueViolation,
        ),
        ("INSERT INTO outbox_adopted SELECT * FROM outbox", psycopg.errors.FeatureNotSupported),
    ],
)
def test_what_a_view_does_not_take(make: Make, statement: str, error: type[Exception]) -> None:
    """What docs/adopt.md says about UPDATE, DELETE, ON CONFLICT, and rows for the old table."""
    adopted = _switched(make)
    with adopted.connect() as connection:
        _insert(connection, idempotency_key="k")
        adopted.relay()
        with pytest.raises(error):
            connection.execute(statement.encode())


@pytest.mark.extended
def test_several_rows_and_copy(make: Make) -> None:
    """Guards the order of the rows of one statement."""
    adopted = _switched(make)
    with adopted.connect() as connection:
        connection.execute(
            f"{BARE}) SELECT 'Order', '{KEY}', 'x', jsonb_build_object('n', n) FROM generate_series(1, 20) "
            f"n".encode()
        )
        columns = b"COPY outbox (aggregate_type, aggregate_id, event_type, payload) FROM STDIN"
        with connection.cursor().copy(columns) as copy:
            for n in range(21, 30):
                copy.write_row(("Order", KEY, "x", json.dumps({"n": n})))
    adopted.relay()
    assert adopted.numbers() == {KEY: list(range(1, 30))}


def test_a_writer_with_few_rights(make: Make) -> None:
    """Guards against writers that lose their rights, or get more than they had."""
    adopted = make(guides.A)
    role = f"writer_{uuid.uuid4().hex[:8]}"
    with adopted.connect() as connection:
        connection.execute(
            f"CREATE ROLE {role}; GRANT INSERT, UPDATE, SELECT (id, created_at) ON outbox TO {role}".encode()
        )
        try:
            adopted.run("adopt", "prepare")
            for step in (adopted.switch, adopted.drain, adopted.back):
                step()
                connection.execute(f"SET ROLE {role}".encode())
                insert = f"{BARE}) VALUES ('Order', '{KEY}', 'x', '{{}}') RETURNING id"
                assert connection.execute(insert.encode()).fetchone()
                for refused in (
                    "SELECT payload FROM outbox",
                    "SELECT FROM box.outbox",
                    "SELECT box.adopted_insert()",
                ):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        connection.execute(refused.encode())
                if step != adopted.back:
                    # A view locks no row: a publisher that was forgotten would publish again and again.
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        connection.execute("SELECT id FROM outbox FOR UPDATE SKIP LOCKED")
                connection.execute("RESET ROLE")
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_numbers_of_the_writer_are_refused(make: Make) -> None:
    """Guards against an id that would be another one in the table."""
    adopted = _switched(make, guides.C)
    with (
        adopted.connect() as connection,
        pytest.raises(psycopg.errors.GeneratedAlways, match="drawn by the database"),
    ):
        connection.execute(
            "INSERT INTO outbox_events (id, aggregate_id, event_type, event_data) VALUES (7, '1', 'x', '{}')"
        )


def test_events_of_other_writers_are_shown_as_far_as_they_fit(make: Make) -> None:
    """Guards against a SELECT that fails because of an event that was written with `emit`."""
    adopted = _switched(make)
    with adopted.connect() as connection:
        connection.execute("SET search_path = box, public")
        connection.autocommit = False
        emit(connection, "Order", "no uuid", "x", {})
        connection.commit()
        rows = connection.execute("SELECT aggregate_id, event_type FROM public.outbox").fetchall()
    assert rows == [(None, "x")]


def test_drivers_that_ask_for_the_last_number(make: Make) -> None:
    """Guards against lastval(), which drivers call after an INSERT, as an error that ends the transaction."""
    adopted = make(guides.C)
    role = f"writer_{uuid.uuid4().hex[:8]}"
    with adopted.connect() as connection:
        connection.execute(
            f"CREATE ROLE {role}; GRANT INSERT, SELECT ON outbox_events TO {role}; "
            f"GRANT USAGE ON SEQUENCE outbox_events_id_seq TO {role}".encode()
        )
        try:
            adopted.run("adopt", "prepare")
            for step in (adopted.switch, adopted.drain, adopted.back):
                step()
                connection.execute(f"SET ROLE {role}".encode())
                row = connection.execute(
                    "INSERT INTO outbox_events (aggregate_id, event_type, event_data) "
                    "VALUES ('1', 'x', '{}') RETURNING id"
                ).fetchone()
                assert connection.execute("SELECT lastval()").fetchone() == row
                connection.execute("RESET ROLE")
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}".encode())


@pytest.mark.extended
def test_writers_that_use_the_outbox_itself(make: Make) -> None:
    """Guards G1: an event that is committed after the way back would be in no position that is waited for."""
    adopted = _switched(make)
    adopted.drain()
    columns = "(aggregate_type, aggregate_id, event_type, payload)"
    event = f"INSERT INTO box.outbox {columns} VALUES ('Order', '{KEY}', 'x', '{{\"n\": %s}}')"
    with adopted.connect() as connection, adopted.connect_to_write() as open_one:
        connection.execute((event % 1).encode())
        open_one.execute((event % 2).encode())
        code, said = adopted.refuse("adopt", "back", "--wait-seconds", "0.5")
        assert (code, "nothing was changed" in said) == (1, True), said
        open_one.commit()
        adopted.back()
        with pytest.raises(
            psycopg.errors.ObjectNotInPrerequisiteState, match=r"events go into public\.outbox"
        ):
            connection.execute((event % 3).encode())
        assert adopted.run("migrate", "--check") == "the schema is up to date\n"
        assert adopted.numbers() == {KEY: [1, 2]}
        adopted.switch()
        connection.execute((event % 4).encode())
    adopted.drain()
    adopted.relay()
    assert adopted.numbers() == {KEY: [1, 2, 4]}
