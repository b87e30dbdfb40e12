"""What a handler may not do to the transaction, with psycopg and with SQLAlchemy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm, text

from outbox_pipelines.consumer import AsyncConsumer, Consumer, Counts, Event
from outbox_pipelines.errors import SetupError
from tests.conftest import either, may_log_in, wait_until
from tests.consumer.place import Place, effect, running, uuid7

Handle = Callable[[Event, Any], object]
IDLE = psycopg.pq.TransactionStatus.IDLE
INSERT = "INSERT INTO effects (event_id) VALUES ('x')"


def sessions(place: Place, driver: str = "psycopg", **more: Any) -> orm.sessionmaker[orm.Session]:
    import psycopg2

    connect = {"psycopg": psycopg.connect, "psycopg2": psycopg2.connect}[driver]
    engine = sqlalchemy.create_engine(
        f"postgresql+{driver}://", creator=lambda: connect(place.dsn), poolclass=sqlalchemy.NullPool, **more
    )
    return orm.sessionmaker(engine)


def of(place: Place, handler: Handle, **more: Any) -> Consumer:
    consumer: Consumer = place.bare(**{"retry_seconds": 300, **more})
    consumer.on("order.placed")(handler)
    return consumer


def fails(place: Place, consumer: Consumer, says: str) -> None:
    """Its handler's attempt has failed with this, and the event waits in the inbox."""
    place.send(uuid7())
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
        assert run.end() == Counts(received=1, failures=1)
    [(state, error)] = place.rows("SELECT state, last_error FROM inbox")
    assert state == "waiting"
    assert re.search(says, error)


def passes_over(run: Callable[[str], object]) -> None:
    run(INSERT)
    with contextlib.suppress(psycopg.Error, sqlalchemy.exc.DBAPIError):
        run("SELECT 1 / 0")


@pytest.mark.parametrize("driver", either("psycopg", "psycopg2"))
def test_a_session_of_sqlalchemy(place: Place, driver: str) -> None:
    """Guards against a record in another transaction than the session's."""
    [first, *_] = place.send(*(uuid7() for _ in range(5)), keys=1)
    failed: list[str] = []

    def handler(event: Event, session: orm.Session) -> None:
        session.execute(text("INSERT INTO effects (event_id) VALUES (:id)"), {"id": event.id})
        if event.id == first and not failed:
            failed.append(event.id)
            raise ValueError("once")

    for group in "billing", "again":
        consumer = of(place, handler, session=sessions(place, driver), group=group, retry_seconds=0)
        with running(consumer) as run:
            wait_until(
                partial(lambda group: place.uncommitted(group) == 0 and place.effects() == 5, group),
                what="all offsets",
            )
            counts = run.end()
        assert (counts.handled, counts.duplicates) == ((5, 0) if group == "billing" else (0, 5))
    assert place.effects() == place.processed() == 5


def test_an_error_passed_over_is_not_committed_as_nothing(place: Place) -> None:
    """Guards against a lost event: the COMMIT of an aborted transaction is answered without an error."""
    fails(place, of(place, lambda _, it: passes_over(it.execute)), "failed and its error was ignored")
    assert place.effects() == 0


@pytest.mark.extended
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_error_passed_over_in_a_session(place: Place, driver: str) -> None:
    consumer = of(
        place,
        lambda _, session: passes_over(lambda sql: session.execute(text(sql))),
        session=sessions(place, driver),
    )
    fails(place, consumer, "failed and its error was ignored")
    assert place.effects() == 0


def test_a_savepoint_makes_an_error_passable(place: Place) -> None:
    place.send(uuid7())

    def handler(event: Event, connection: psycopg.Connection[Any]) -> None:
        effect(event, connection)
        with pytest.raises(psycopg.Error), connection.transaction():
            connection.execute("SELECT 1 / 0")

    with running(of(place, handler)) as run:
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
        assert run.end() == Counts(handled=1)
    assert place.effects() == 1


def _raise_rollback(_: Event, connection: psycopg.Connection[Any]) -> None:
    connection.execute(INSERT)
    raise psycopg.Rollback


@pytest.mark.parametrize(
    "handler",
    [
        lambda _, it: it.commit(),
        lambda _, it: it.rollback(),
        lambda _, it: it.execute("ROLLBACK"),
        _raise_rollback,
    ],
    ids=["commit", "rollback", "ROLLBACK", "Rollback"],
)
def test_a_handler_that_ends_the_transaction_fails(place: Place, handler: Handle) -> None:
    """Guards against effects without their record, or an event that is lost with its offset committed."""
    fails(place, of(place, handler), " ended the transaction|forbidden within a Transaction")
    assert place.effects() == 0


@pytest.mark.extended
@pytest.mark.parametrize("end", ["rollback", "close"])
def test_a_handler_that_ends_the_session_fails(place: Place, end: str) -> None:
    def handler(_: Event, session: orm.Session) -> None:
        session.execute(text(INSERT))
        getattr(session, end)()

    fails(place, of(place, handler, session=sessions(place)), " ended the transaction")
    assert place.effects() == 0


def test_a_connection_of_ones_own(place: Place) -> None:
    place.send(uuid7())
    consumer = of(
        place, effect, connect=lambda: psycopg.connect(place.dsn, row_factory=psycopg.rows.dict_row)
    )
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
        assert run.end() == Counts(handled=1)
    assert place.effects() == place.processed() == 1


def test_a_connection_with_an_open_transaction_is_refused(place: Place) -> None:
    """Guards against a consumer whose every commit is a savepoint's."""

    def connect() -> psycopg.Connection[Any]:
        connection = psycopg.connect(place.dsn)
        connection.execute("SELECT 1")
        return connection

    place.send(uuid7())
    with running(of(place, effect, connect=connect)) as run, pytest.raises(SetupError, match="open trans"):
        run.wait()
    assert (place.effects(), place.uncommitted()) == (0, 1)


def test_an_engine_that_commits_each_statement_is_refused(place: Place) -> None:
    """Guards against a record that is committed before the handler has begun."""
    place.send(uuid7())
    factory = sessions(place, isolation_level="AUTOCOMMIT")
    with running(of(place, effect, session=factory)) as run, pytest.raises(SetupError, match="AUTOCOMMIT"):
        run.wait()
    assert (place.processed(), place.uncommitted()) == (0, 1)


def test_few_rights_are_enough(place: Place) -> None:
    """Guards against a consumer that must be the owner of the tables."""
    role = f"role_{uuid.uuid4().hex[:12]}"
    place.rows(f"CREATE ROLE {role} {may_log_in(place.dsn)}")
    try:
        place.rows(f"GRANT SELECT, INSERT ON processed_events, effects TO {role}")
        place.rows(f"GRANT SELECT, INSERT, UPDATE ON inbox TO {role}")
        place.rows(f"GRANT SELECT, INSERT, UPDATE, DELETE ON partition_owners TO {role}")
        place.rows(f"GRANT USAGE ON SEQUENCE effects_seq_seq TO {role}")
        place.send(uuid7())
        consumer = of(place, effect, connect=lambda: psycopg.connect(place.dsn, user=role))
        with running(consumer) as run:
            wait_until(lambda: place.uncommitted() == 0, what="its offset")
            assert run.end() == Counts(handled=1)
    finally:
        place.rows(f"DROP OWNED BY {role}")
        place.rows(f"DROP ROLE {role}")


def test_a_thread_that_is_late(place: Place) -> None:
    """Guards against a message about `connect`, which is not the cause."""
    late: list[threading.Thread] = []

    def handler(event: Event, connection: psycopg.Connection[Any]) -> None:
        def work() -> None:
            # Until the handler's transaction is committed.
            wait_until(lambda: connection.info.transaction_status == IDLE, what="the commit")
            connection.execute(INSERT)

        effect(event, connection)
        late.append(threading.Thread(target=work))
        late[0].start()

    consumer = of(place, handler)
    place.send(uuid7())
    with running(consumer) as run:
        wait_until(lambda: bool(late) and not late[0].is_alive(), what="the thread")
        place.send(uuid7())
        with pytest.raises(SetupError, match=r"after its handler had returned: wait in the handler"):
            run.wait()
    assert place.effects() == 1


def test_what_connect_returns(place: Place) -> None:
    """Guards against an AttributeError from within the library: `connection has no attribute pgconn`."""
    import psycopg2

    async def never() -> None: ...

    later = never()
    for connect, says in (
        (lambda: psycopg2.connect(place.dsn), r"psycopg2\.extensions\.connection: .* Connection of psycopg"),
        (lambda: None, "connect returned a builtins.NoneType"),
        (lambda: later, "connect returned a builtins.coroutine"),
    ):
        consumer = of(place, effect, connect=connect)
        with pytest.raises(SetupError, match=says):
            consumer.run(threading.Event())
    later.close()
    with pytest.raises(SetupError, match=r"session returned a psycopg\.Connection: .* Session of sqlalchemy"):
        of(place, effect, session=lambda: psycopg.connect(place.dsn)).drain(until_empty=True)


def test_what_connect_returns_to_an_asynchronous_consumer(place: Place) -> None:
    """Guards against a TypeError about `await`."""
    consumer = place.bare(kind=AsyncConsumer, connect=lambda: psycopg.connect(place.dsn))

    @consumer.on("order.placed")
    async def handler(event: Event, connection: object) -> None: ...

    with pytest.raises(SetupError, match=r"psycopg\.Connection: .* AsyncConnection of psycopg"):
        asyncio.run(consumer.drain(until_empty=True))
