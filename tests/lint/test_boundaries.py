"""Where each rule ends: small pairs of what is found and what is not, side by side."""

from __future__ import annotations

import textwrap

import pytest

from outbox_pipelines.lint.linter import check_sources
from tests.lint.test_fixtures import marked

HEAD = """
import contextlib
import logging
import psycopg
from confluent_kafka import Producer
from django.db import connection as django, transaction
from sqlalchemy.orm import Session, sessionmaker
from outbox_pipelines.writer import OutboxError, emit
from outbox_pipelines.writer.sqlalchemy import OutboxEvent
log = logging.getLogger()
INSERT = "INSERT INTO orders VALUES (1)"
def tell(connection): ...
"""


def holds(source: str) -> None:
    """Exactly the marked lines of the source are found."""
    text = HEAD + textwrap.dedent(source)
    findings = check_sources({"a.py": text.encode()})
    assert [(finding.line, finding.code) for finding in findings] == marked(text)


def test_a_new_unit_of_work_after_the_commit() -> None:
    """Guards against an alarm about a function whose caller commits the second half."""
    holds("""
        def f(session: Session):
            session.commit()
            session.add(1)
            emit(session, "o", 1, "e", {})

        def g(session: Session):
            session.add(1)
            session.commit()
            emit(session, "o", 1, "e", {})  # finds OB002

        def h():
            connection = psycopg.connect("")
            connection.commit()
            connection.execute(INSERT)
            emit(connection, "o", 1, "e", {})  # finds OB002
        """)


def test_a_commit_through_something_unknown() -> None:
    """Guards against an alarm about a session whose owner commits by another name."""
    holds("""
        def f(session: Session, work):
            session.commit()
            emit(session, "o", 1, "e", {})
            work.commit()

        def g(session: Session, work):
            session.commit()
            emit(session, "o", 1, "e", {})  # finds OB002
            work.close()
        """)


def test_branches_of_one_function() -> None:
    """Guards against steps of two runs taken for one: commit and event in two branches, or a return
    between."""
    holds("""
        def f(session: Session, known):
            if known:
                session.commit()
            else:
                emit(session, "o", 1, "e", {})

        def g(session: Session, known):
            if known:
                session.commit()
                return
            emit(session, "o", 1, "e", {})

        def h(session: Session, known):
            try:
                session.commit()
            except ValueError:
                session.rollback()
                emit(session, "o", 1, "e", {})

        def i(session: Session, known):
            if known:
                session.commit()
            emit(session, "o", 1, "e", {})  # finds OB002
        """)


def test_what_branches_agree_on() -> None:
    """Guards against a connection in autocommit mode on one way only, taken for one that always is."""
    holds("""
        def f(known):
            if known:
                connection = psycopg.connect("", autocommit=True)
            else:
                connection = tell(known)
            emit(connection, "o", 1, "e", {})

        def g(known):
            if known:
                connection = psycopg.connect("", autocommit=True)
            else:
                raise ValueError
            emit(connection, "o", 1, "e", {})  # finds OB001
        """)


def test_a_second_connection_with_work_of_its_own() -> None:
    """Guards against an alarm about two transactions that each write rows and event, or about a helper's
    rows."""
    holds("""
        def f():
            with psycopg.connect("") as one, psycopg.connect("") as other:
                one.execute(INSERT)
                other.execute(INSERT)
                emit(other, "o", 1, "e", {})

        def g():
            with psycopg.connect("") as one, psycopg.connect("") as other:
                one.execute(INSERT)
                tell(other)
                emit(other, "o", 1, "e", {})

        def h():
            with psycopg.connect("") as one, psycopg.connect("") as other:
                one.execute(INSERT)
                emit(other, "o", 1, "e", {})  # finds OB003
        """)


def test_given_things_that_may_be_one_connection() -> None:
    """Guards against an alarm about a session and the connection that it works on."""
    holds("""
        def f(session: Session, cursor: psycopg.Cursor):
            session.add(1)
            emit(cursor, "o", 1, "e", {})

        def g(session: Session):
            session.add(1)
            emit(session.connection(), "o", 1, "e", {})

        def h(session: Session, other: Session):
            session.add(1)
            emit(other, "o", 1, "e", {})  # finds OB003
        """)


def test_an_error_that_ends_the_transaction_too() -> None:
    """Guards against an alarm where rows and event are rolled back together, and only the error is logged."""
    holds("""
        def f(order):
            try:
                with transaction.atomic():
                    order.save()
                    emit(django, "o", 1, "e", {})
            except Exception:
                log.exception("no order")

        def g(session: Session):
            try:
                session.add(1)
                emit(session, "o", 1, "e", {})
                session.commit()
            except Exception:
                log.exception("no order")

        def h(session: Session):
            session.add(1)
            try:
                emit(session, "o", 1, "e", {})  # finds OB005
            except Exception:
                log.exception("no event")
            session.commit()
        """)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("except Exception", True),
        ("except", True),
        ("except (KeyError, OutboxError)", True),
        ("except KeyError", False),
        ("except psycopg.errors.LockNotAvailable", False),
    ],
)
def test_which_errors_are_any_error(error: str, found: bool) -> None:
    """Guards against an alarm about a handler for one foreseen error; a bare `except:` that passes."""
    holds(f"""
        def f(session: Session):
            try:
                emit(session, "o", 1, "e", {{}}){"  # finds OB005" if found else ""}
            {error}:
                pass
        """)


def test_suppress() -> None:
    """The same mistake in one line."""
    holds("""
        def f(session: Session):
            with contextlib.suppress(Exception):
                emit(session, "o", 1, "e", {})  # finds OB005
            with contextlib.suppress(KeyError):
                emit(session, "o", 1, "e", {})
        """)


def test_a_publish_beside_a_connection_whose_mode_is_not_known() -> None:
    """Guards against an alarm about a message after a statement that is autocommitted or the caller's."""
    holds("""
        def f(connection: psycopg.Connection, producer: Producer):
            with connection:
                connection.execute(INSERT)
                producer.produce("t")

        def g(connection: psycopg.Connection, producer: Producer):
            connection.execute(INSERT)
            producer.produce("t")

        def h(connection: psycopg.Connection, producer: Producer):
            connection.execute(INSERT)
            producer.produce("t")  # finds OB006
            connection.commit()
        """)


def test_a_session_that_may_be_committed_by_then() -> None:
    """Guards against an alarm about a message after a commit in a helper, or through a unit of work."""
    holds("""
        class Orders:
            def __init__(self, session: Session, producer: Producer, work):
                self.session, self.work = tell(session), work
                self.session: Session = session
                self.producer = producer

            def f(self):
                self.session.add(1)
                self.save()
                self.producer.produce("t")
                self.session.commit()
                emit(self.session, "o", 1, "e", {})
                self.save()

            def g(self):
                self.session.add(1)
                self.work.commit()
                self.producer.produce("t")

            def h(self):
                self.session.add(1)
                tell(self.session)
                self.producer.produce("t")

            def i(self):
                self.session.add(1)
                self.producer.produce("t")  # finds OB006

            def save(self):
                self.session.commit()
        """)


def test_a_publish_before_anything_is_opened() -> None:
    """Guards against an alarm about a message that has nothing to do with the transaction after it."""
    holds("""
        def f(producer: Producer):
            producer.produce("t")
            with psycopg.connect("") as connection:
                connection.execute(INSERT)

        def g(producer: Producer):
            with psycopg.connect("") as connection:
                producer.produce("t")  # finds OB006
                connection.execute(INSERT)
        """)


def test_a_block_that_only_reads() -> None:
    """Guards against an alarm about a message made of what a transaction has read, and nothing written."""
    holds("""
        def f(connection: psycopg.Connection, producer: Producer):
            with connection.transaction():
                row = connection.execute("SELECT total FROM payments").fetchone()
                producer.produce("t", str(row))

        def g(connection: psycopg.Connection, producer: Producer):
            with connection.transaction():
                row = connection.execute("SELECT total FROM payments FOR UPDATE").fetchone()
                tell(connection)
                producer.produce("t", str(row))  # finds OB006
        """)


def test_a_script() -> None:
    """Guards against work of a module that is passed over as a relay's, because it imports the writer."""
    holds("""
        producer = Producer({})
        with psycopg.connect("") as connection:
            connection.execute(INSERT)
            producer.produce("t")  # finds OB006
        """)


def test_names_that_mean_something_else_inside() -> None:
    """Guards against an alarm about a list's connections, because one of their name was in autocommit
    mode."""
    holds("""
        def f(connections, pairs):
            connection = psycopg.connect("", autocommit=True)
            [emit(connection, "o", 1, "e", {}) for connection in connections]
            emit(connection, "o", 1, "e", {})  # finds OB001
            with tell(pairs) as (connection, other):
                emit(connection, "o", 1, "e", {})

        def g(holder):
            connection = psycopg.connect("")
            connection.commit()
            emit(connection, "o", 1, "e", {})
            holder.connection = connection
        """)


def test_a_publish_in_another_branch() -> None:
    """Guards against an alarm about a message that is sent instead of the write."""
    holds("""
        def f(session: Session, producer: Producer, known):
            if known:
                session.add(1)
            else:
                producer.produce("t")
            session.commit()

        def g(session: Session, producer: Producer, known):
            session.add(1)
            if known:
                producer.produce("t")  # finds OB006
            session.commit()
        """)


def test_our_model_beside_one_of_the_same_name() -> None:
    """Guards against our own model called a bypass in an application that has had one of its own."""
    sources = {
        "old.py": "class OutboxEvent:\n    __tablename__ = 'outbox'\n",
        "new.py": HEAD + "def f(session: Session):\n    session.add(OutboxEvent())\n",
    }
    assert check_sources({path: source.encode() for path, source in sources.items()}) == []


def test_a_block_of_ones_own_lends_its_transaction() -> None:
    """Guards against an alarm at each event of an application that has one function for its transactions."""
    holds("""
        @contextlib.contextmanager
        def unit():
            connection = psycopg.connect("", autocommit=True)
            with connection.transaction():
                yield connection

        @contextlib.contextmanager
        def bare():
            connection = psycopg.connect("", autocommit=True)
            with connection.transaction():
                connection.execute(INSERT)
            yield connection

        def f():
            with unit() as connection:
                connection.execute(INSERT)
                emit(connection, "o", 1, "e", {})

        def g():
            with bare() as connection:
                connection.execute(INSERT)
                emit(connection, "o", 1, "e", {})  # finds OB001
        """)


def test_a_decorator_of_ones_own_opens_a_transaction() -> None:
    """Guards against an alarm at each view of an application that decorates them."""
    holds("""
        def uow(function):
            def wrapped(*given):
                with transaction.atomic():
                    return function(*given)
            return wrapped

        def logged(function):
            def wrapped(*given):
                with contextlib.nullcontext():
                    return function(*given)
            return wrapped

        @uow
        def f(request):
            emit(django, "o", 1, "e", {})

        @logged
        def g(request):
            emit(django, "o", 1, "e", {})  # finds OB001

        def h(request):
            transaction.set_autocommit(False)
            emit(django, "o", 1, "e", {})
            transaction.commit()
        """)


def test_a_coroutine_that_is_named_for_nothing() -> None:
    """Guards against an event that is not written, because its coroutine got a name that nothing reads."""
    holds("""
        from sqlalchemy.ext.asyncio import AsyncSession

        async def f(session: AsyncSession):
            _ = emit(session, "o", 1, "e", {})  # finds OB004
            _ = await emit(session, "o", 1, "e", {})
            unread = emit(session, "o", 1, "e", {})  # finds OB004
            unread = 1
            written = await emit(session, "o", 1, "e", {})
            awaited = emit(session, "o", 1, "e", {})
            await awaited
            given = emit(session, "o", 1, "e", {})
            return lambda: given

        async def g(session: AsyncSession):
            global kept
            kept = emit(session, "o", 1, "e", {})
        """)
