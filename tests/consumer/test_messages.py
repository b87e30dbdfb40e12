"""BEGIN and the record are one message of psycopg, with the commit before, whatever becomes of each."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import psycopg
import pytest
from psycopg import IsolationLevel

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer import migrate, processed_events
from outbox_pipelines.consumer.consumer import drive
from outbox_pipelines.consumer.consumer_database import TransactionError
from outbox_pipelines.consumer.psycopg_transactions import _MOST_LOSSES, Connections
from tests.conftest import wait_until
from tests.consumer.place import uuid7
from tests.schema.servers import Database

Connection = psycopg.Connection[Any]
WORK: Final = "INSERT INTO effects (id) VALUES (%s)"


@pytest.fixture
def database(empty: Database) -> Database:
    with empty.connect() as connection:
        migrate(connection)
        connection.execute("CREATE TABLE effects (id text)")
    return empty


def given(event_id: uuid.UUID, **more: object) -> dict[str, object]:
    same = {"source": "billing", "topic": "orders", "key": "1", "block": False, "content": None}
    return {"id": str(event_id), "bucket": processed_events.bucket(event_id), **same, **more}


def handled(
    its: Connections,
    parameters: Mapping[str, Any],
    handler: Callable[[Connection], object],
    following: Mapping[str, Any] | None = None,
) -> bool:
    """As the consumer handles an event, before the following one; return whether it is new."""

    async def handle() -> bool:
        async with its.transaction() as transaction:
            is_new = bool(await its.rows(transaction, queries.RECORD, parameters))
            if is_new:
                handler(transaction)
                if not await its.end_handling(
                    transaction, None if following is None else (queries.RECORD, following)
                ):
                    raise TransactionError
            return is_new

    return drive(handle())


def work(connection: Connection) -> None:
    connection.execute(WORK, ["x"])


@contextmanager
def answers(connection: Connection) -> Iterator[list[int]]:
    """How often the server was waited for in the block."""
    found: list[int] = []
    with tempfile.TemporaryFile() as file:
        connection.pgconn.trace(file.fileno())
        try:
            yield found
        finally:
            connection.pgconn.untrace()
        file.seek(0)
        found.append(file.read().count(b"ReadyForQuery"))


def test_an_event_takes_two_messages_beside_its_handlers(database: Database) -> None:
    with database.connect() as connection:
        its = Connections(lambda: connection)
        for _ in range(10):
            # Until psycopg has prepared the handler's statement.
            assert handled(its, given(uuid7()), work)
        with answers(connection) as found:
            for _ in range(10):
                assert handled(its, given(uuid7()), work)
    assert found == [30]
    assert database.value("SELECT count(*) FROM effects") == 20


def test_events_in_a_row_take_one_message_beside_their_handlers(database: Database) -> None:
    events = [given(uuid7()) for _ in range(21)]
    with database.connect() as connection:
        its = Connections(lambda: connection)
        for event, following in pairwise(events[:11]):
            assert handled(its, event, work, following)
        with answers(connection) as found:
            for event, following in pairwise(events[10:]):
                assert handled(its, event, work, following)
        assert handled(its, events[-1], work)
    assert found == [20]
    counts = database.rows("SELECT count(*), count(DISTINCT processed_at) FROM processed_events")
    assert counts == [(21, 21)]
    assert database.value("SELECT count(*) FROM effects") == 21


@pytest.mark.parametrize("then", ["another", "a failure", "a read", "nothing"])
def test_what_was_expected_to_follow_and_does_not_is_not_recorded(database: Database, then: str) -> None:
    """Guards against an event that is recorded and not handled: it was skipped, or its partition is gone."""
    first, expected, other = (given(uuid7()) for _ in range(3))

    def fails(_: Connection) -> None:
        raise ValueError

    async def read(its: Connections) -> None:
        async with its.transaction() as transaction:
            assert await its.rows(transaction, queries.IS_SAME, expected) == []

    with database.connect() as connection:
        its = Connections(lambda: connection)
        assert handled(its, first, work, expected)
        if then == "another":
            assert handled(its, other, work)
        elif then == "a failure":
            with pytest.raises(ValueError):  # noqa: PT011 - the handler's
                handled(its, expected, fails)
        elif then == "a read":
            drive(read(its))
        else:
            drive(its.close())
        wait_until(
            lambda: (
                database.value(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND state LIKE 'idle in%'"
                )
                == 0
            ),
            what="the end of the transaction",
        )
        recorded = {str(event_id) for (event_id,) in database.rows("SELECT event_id FROM processed_events")}
        assert recorded == {first["id"], *((other["id"],) if then == "another" else ())}
        with database.connect() as successor:
            assert handled(Connections(lambda: successor), expected, work)


def test_a_text_that_cannot_be_sent_is_reported_by_its_own_event(database: Database) -> None:
    """Guards against an event that fails because of the content of the next one."""
    first, following = given(uuid7()), given(uuid7(), key="Żółć")
    with database.connect() as connection:
        connection.execute("SET client_encoding = 'LATIN1'")
        its = Connections(lambda: connection)
        assert handled(its, first, work, following)
        with pytest.raises(UnicodeEncodeError):
            handled(its, following, work)
    assert database.value("SELECT count(*) FROM processed_events") == 1


def test_what_a_lost_connection_has_recorded_is_recorded_again(database: Database) -> None:
    """Guards against a handler that runs without its record: the answer was that of another session."""
    opened: list[Connection] = []

    def connect() -> Connection:
        opened.append(database.connect())
        return opened[-1]

    its = Connections(connect)
    following = given(uuid7())
    assert handled(its, given(uuid7()), work, following)
    opened[0].close()
    assert handled(its, following, work)
    drive(its.close())
    assert len(opened) == 2
    assert database.value("SELECT count(*) FROM processed_events") == 2


@pytest.mark.parametrize("why", ["locked", "known", "DEALLOCATE ALL", "terminated"])
def test_a_commit_counts_whatever_follows_it(database: Database, why: str) -> None:
    """Guards against an event that counts as failed because the next one cannot be recorded now."""
    first, following = given(uuid7()), given(uuid7())

    def prepares(transaction: Connection) -> None:
        work(transaction)
        if why.isupper():
            transaction.execute(why.encode())

    with database.connect() as connection, database.connect(autocommit=False) as other:
        connection.execute("SET lock_timeout = '50ms'")
        its = Connections(lambda: connection)
        if why in ("locked", "terminated"):
            other.execute(queries.RECORD.encode(), following)
        elif why == "known":
            assert handled(Connections(lambda: other), following, work)
        if why == "terminated":
            connection.execute("SET lock_timeout = 0")
            pid = connection.info.backend_pid
            ending = threading.Thread(target=_terminate_waiting, args=(database, pid))
            ending.start()
        assert handled(its, first, prepares, following)
        other.rollback()
        if why == "terminated":
            ending.join()
            assert connection.closed
            return
        assert handled(its, following, work) is (why != "known")
    assert database.value("SELECT count(*) FROM processed_events") == 2
    assert database.value("SELECT count(*) FROM effects") == 2


def _terminate_waiting(database: Database, pid: int) -> None:
    """Terminate a session once it waits for a lock."""
    wait_until(
        lambda: database.value(
            f"SELECT bool_or(pg_terminate_backend(pid)) FROM pg_stat_activity "
            f"WHERE pid = {pid} AND wait_event_type = 'Lock'"
        ),
        what="a session that waits",
    )


def test_nothing_follows_a_commit_that_fails(database: Database) -> None:
    """Guards against an event that counts as handled although its COMMIT was refused."""
    first, following = given(uuid7()), given(uuid7())
    database.rows("ALTER TABLE effects ADD CONSTRAINT once UNIQUE (id) DEFERRABLE INITIALLY DEFERRED")

    def twice(connection: Connection) -> None:
        work(connection)
        work(connection)

    def ends(connection: Connection) -> None:
        connection.execute("ROLLBACK; BEGIN")
        work(connection)

    with database.connect() as connection:
        its = Connections(lambda: connection)
        with pytest.raises(psycopg.errors.UniqueViolation):
            handled(its, first, twice, following)
        with pytest.raises(TransactionError):
            handled(its, first, ends, following)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert database.value("SELECT count(*) FROM processed_events") == 0
    assert database.value("SELECT count(*) FROM effects") == 0


def test_an_event_is_recorded_once(database: Database) -> None:
    event_id = uuid7()
    with database.connect() as connection:
        its = Connections(lambda: connection)
        assert [handled(its, given(event_id), work) for _ in range(3)] == [True, False, False]
    assert database.value("SELECT count(*) FROM effects") == 1


@pytest.mark.parametrize("statement", ["DEALLOCATE ALL", "DISCARD PLANS", "SELECT 1"])
def test_a_handler_may_remove_prepared_statements(database: Database, statement: str) -> None:
    """Guards against an event that fails, or is handled outside of a transaction, without its statement."""
    with database.connect() as connection:
        its = Connections(lambda: connection)

        def removes(transaction: Connection) -> None:
            work(transaction)
            transaction.execute(statement.encode())

        for _ in range(_MOST_LOSSES + 5):
            assert handled(its, given(uuid7()), removes)
    counts = database.rows("SELECT count(*), count(DISTINCT processed_at) FROM processed_events")
    assert counts == [(_MOST_LOSSES + 5, _MOST_LOSSES + 5)]
    assert database.value("SELECT count(*) FROM effects") == _MOST_LOSSES + 5


def test_a_session_that_has_the_statement_already(database: Database) -> None:
    """As behind a pooler, and after a rollback that left it there."""
    with database.connect() as connection:
        for _ in range(3):
            its = Connections(lambda: connection)
            assert handled(its, given(uuid7()), work)
            assert handled(its, given(uuid7()), work)
    assert database.value("SELECT count(*) FROM processed_events") == 6


@pytest.mark.parametrize("ends", ["ROLLBACK", "COMMIT", "ROLLBACK; BEGIN", "raise"])
def test_a_handler_that_fails_leaves_nothing_and_the_next_works(database: Database, ends: str) -> None:
    """Guards against statements behind a handler's ROLLBACK that are committed one by one."""

    def fails(connection: Connection) -> None:
        work(connection)
        if ends == "raise":
            raise ValueError
        connection.execute(ends.encode())
        work(connection)

    event_id = uuid7()
    with database.connect() as connection:
        its = Connections(lambda: connection)
        for _ in range(8):
            with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind
                handled(its, given(event_id), fails)
        assert database.value("SELECT count(*) FROM effects") == 0
        assert handled(its, given(event_id), work)
    assert database.value("SELECT count(*) FROM effects") == 1


@pytest.mark.parametrize("conforming", ["on", "off"])
@pytest.mark.parametrize("name", ["o'neil", "a\\'; DROP TABLE effects; --", "100 % {x}", "$1", "Żółć 🧾", ""])
def test_any_text_is_recorded_as_it_is(database: Database, name: str, conforming: str) -> None:
    with database.connect() as connection:
        connection.execute(f"SET standard_conforming_strings = {conforming}".encode())
        connection.execute("SET escape_string_warning = off")
        its = Connections(lambda: connection)
        for _ in range(2):
            assert handled(its, given(uuid7(), source=name, topic=name, key=name), work)
    assert database.rows("SELECT source, count(*) FROM processed_events GROUP BY 1") == [(name, 2)]


def test_settings_of_the_connection_hold(database: Database) -> None:
    """Guards against a transaction with another isolation than its connection says."""
    seen = []
    with database.connect() as connection:
        connection.isolation_level = IsolationLevel.SERIALIZABLE
        its = Connections(lambda: connection)

        def look(transaction: Connection) -> None:
            seen.append(transaction.execute("SHOW transaction_isolation").fetchone())

        for _ in range(3):
            assert handled(its, given(uuid7()), look)
    assert seen == [("serializable",)] * 3


def test_without_prepared_statements(database: Database) -> None:
    """As for a pooler that does not support them."""
    with database.connect() as connection:
        connection.prepare_threshold = None
        its = Connections(lambda: connection)
        for _ in range(8):
            assert handled(its, given(uuid7()), work)
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)


def test_asynchronously(database: Database) -> None:
    ids = [uuid7() for _ in range(20)]
    found: list[int] = []

    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(database.dsn) as connection:

            async def connect() -> psycopg.AsyncConnection[Any]:
                return connection

            its = Connections(connect, psycopg.AsyncConnection)
            for n, (event_id, next_id) in enumerate(pairwise([*ids, *ids, uuid7()])):
                async with its.transaction() as transaction:
                    rows = await its.rows(transaction, queries.RECORD, given(event_id))
                    found.append(len(rows))
                    if rows:
                        await transaction.execute(WORK, ["x"])
                        if n % 3 == 0:
                            await transaction.execute("DEALLOCATE ALL")
                        await its.end_handling(transaction, (queries.RECORD, given(next_id)))

    asyncio.run(scenario())
    assert found == [1] * 20 + [0] * 20
    assert database.value("SELECT count(*) FROM effects") == 20
