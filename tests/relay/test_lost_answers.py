"""A database whose packets are acknowledged and whose answers are lost, while a relay is to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.core import answers
from outbox_pipelines.core.answers import Session, limited_after
from outbox_pipelines.local import Stack
from outbox_pipelines.relay import relay_sql, service
from outbox_pipelines.relay.fleet import watcher
from outbox_pipelines.relay.fleet.relay_all import relay_all
from outbox_pipelines.relay.lease import owner_session
from outbox_pipelines.relay.read.slot import slot_cutover
from outbox_pipelines.relay.read.slot.slot_setup import remove
from outbox_pipelines.settings import Settings
from tests.conftest import EITHER_DELIVERY, Outbox, fresh_database, topic_prefix, wait_until
from tests.existing import textbook
from tests.history.proxy import Proxy
from tests.relay.threads import owners, running

_PATIENCE = 0.5
# Longer than wal_sender_timeout (60 s): the server may learn only by it that the session that read has ended.
_SLOT_SECONDS = 120.0


@pytest.fixture
def proxy(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between a relay and the database; sessions are patient for half a second after a stop."""
    monkeypatch.setattr(answers, "PATIENCE", _PATIENCE)
    with psycopg.connect(stack.dsn) as connection, Proxy(connection.info.port) as proxy:
        yield proxy


def _through(outbox: Outbox, proxy: Proxy, **more: object) -> Settings:
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.require_dsn(), host="127.0.0.1", port=proxy.port)
    return outbox.settings.model_copy(update={"dsn": type(outbox.settings.dsn)(dsn), **more})


@contextmanager
def _stopped(run: Callable[[threading.Event], object], proxy: Proxy) -> Iterator[None]:
    """Runs it while the block runs, which loses the answers; it must end then."""
    stop = threading.Event()
    relay = threading.Thread(target=run, args=[stop])
    relay.start()
    try:
        yield
        stop.set()
        relay.join(600)
        assert not relay.is_alive()
    finally:
        stop.set()
        proxy.heal()
        relay.join(600)


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_a_relay_ends(outbox: Outbox, proxy: Proxy, delivery: str) -> None:
    """Guards against a relay that waits for an answer until it is killed; its events are not lost."""
    settings = _through(outbox, proxy, delivery=delivery)
    with _stopped(lambda stop: service.relay(settings, stop=stop), proxy):
        outbox.write("a")
        wait_until(lambda: [message.key for message in outbox.messages()] == ["a"], what="an event")
        proxy.swallow_answers()
        outbox.write("b")
    direct = outbox.settings.model_copy(update={"delivery": delivery})
    wait_until(lambda: owners(outbox) == [None], what="the database to notice the end")
    service.relay(direct, until_empty=True)
    assert {message.key for message in outbox.messages()} == {"a", "b"}


@pytest.mark.extended
@pytest.mark.parametrize("reads", ["polling", "a slot", "a marked table"])
def test_a_relay_continues(
    stack: Stack, outbox: Outbox, proxy: Proxy, tmp_path: Path, reads: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a relay that waits for ever on connections which something in between has lost."""
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    with ExitStack() as stack_of, fresh_database(stack.dsn) as dsn:
        if reads == "a marked table":
            table = textbook.make(dsn, stack.kafka, f"{topic_prefix()}-events", *shape)
            source: Outbox = table.outbox
            write: Callable[[str], object] = lambda key: table.write((key, {}))  # noqa: E731 - as below
        else:
            source, write = outbox, outbox.write
        settings = _through(source, proxy, lease_seconds=1.0)
        with _stopped(lambda stop: service.relay(settings, stop=stop), proxy):
            write("a")
            wait_until(lambda: [message.key for message in source.messages()] == ["a"], what="an event")
            if reads == "a slot":
                slot_cutover.run(outbox.settings, "cdc", seconds=60, say=lambda line: None)
                stack_of.callback(remove, outbox.settings, seconds=_SLOT_SECONDS, say=lambda line: None)
            proxy.forget()
            write("b")
            wait_until(lambda: {message.key for message in source.messages()} == {"a", "b"}, what="the next")
    assert "the database has no statement of this relay" in caplog.text


def test_a_reader_that_is_lost_alone(outbox: Outbox, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a relay that sends heartbeats, and whose other session waits for ever."""
    settings = _through(outbox, proxy, lease_seconds=1.0)
    with outbox.connect() as watching, _stopped(lambda stop: service.relay(settings, stop=stop), proxy):
        outbox.write("a")
        wait_until(lambda: [message.key for message in outbox.messages()] == ["a"], what="an event")
        proxy.forget_one(_reader_port(watching))
        outbox.write("b")
        wait_until(lambda: {message.key for message in outbox.messages()} == {"a", "b"}, what="the next")
    assert "the database has no statement of this relay" in caplog.text


def test_a_fleets_reader_that_is_lost_alone(
    outbox: Outbox, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a question of all outboxes of a database that is never answered, and never put again."""
    monkeypatch.setattr(watcher, "_LOST_SECONDS", 1.0)
    with (
        outbox.connect() as watching,
        _stopped(lambda stop: relay_all([_through(outbox, proxy)], stop=stop), proxy),
    ):
        outbox.write("a")
        wait_until(lambda: [message.key for message in outbox.messages()] == ["a"], what="an event")
        proxy.forget_one(_reader_port(watching))
        outbox.write("b")
        wait_until(lambda: {message.key for message in outbox.messages()} == {"a", "b"}, what="the next")


def _reader_port(connection: psycopg.Connection[tuple[Any, ...]]) -> int:
    ((port,),) = connection.execute(
        "SELECT client_port FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'outbox relay: reader'"
    ).fetchall()
    return int(port)


def test_a_relay_that_has_lost_its_shard_does_not_wait_for_its_reader(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that is neither owner nor standby, since its reader gets no answer."""
    monkeypatch.setattr(answers, "PATIENCE", _PATIENCE)
    name = "outbox relay: reader"
    settings = outbox.settings.model_copy(update={"lease_seconds": 1.0})
    with running(settings), outbox.connect(autocommit=False) as other:
        wait_until(lambda: owners(outbox) != [None], what="a relay")
        other.execute("LOCK TABLE outbox")
        wait_until(lambda: name in _waiting(outbox), what="the reader to wait")
        other.execute("SELECT pg_terminate_backend(pid) FROM outbox_shards")
        wait_until(lambda: name not in _waiting(outbox), what="the end of the reader")


def test_a_statement_that_waits_is_not_lost(
    outbox: Outbox, proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that starts over, and repeats events, since a lock is held for long; also where
    the database has just answered, and a busy process has not seen it."""
    settings = _through(outbox, proxy, lease_seconds=1.0)
    worked_for, answers = owner_session._is_worked_for, iter([False])
    monkeypatch.setattr(
        owner_session, "_is_worked_for", lambda *given: next(answers, None) is None and worked_for(*given)
    )
    longest = (
        "SELECT max(clock_timestamp() - query_start) > interval '5 s' FROM pg_stat_activity "
        "WHERE datname = current_database() "
        "AND application_name LIKE 'outbox relay: %' AND wait_event_type = 'Lock'"
    )
    with (
        outbox.connect(autocommit=False) as other,
        outbox.connect() as watching,
        _stopped(lambda stop: service.relay(settings, stop=stop), proxy),
    ):
        wait_until(lambda: owners(outbox) != [None], what="a relay")
        other.execute("SELECT FROM outbox_shards FOR UPDATE")
        outbox.write("a")
        wait_until(lambda: watching.execute(longest).fetchone() == (True,), what="a long wait")
        other.rollback()
        wait_until(lambda: [each.key for each in outbox.messages()] == ["a"], what="the event")
    assert "has no statement of this relay" not in caplog.text


@pytest.mark.extended
def test_a_relay_that_reads_a_slot_ends(outbox: Outbox, proxy: Proxy) -> None:
    """Guards against waits of the session that replicates, and of the one that reads beside it."""
    with _stopped(lambda stop: service.relay(_through(outbox, proxy), stop=stop), proxy):
        wait_until(lambda: owners(outbox) != [None], what="a relay")
        slot_cutover.run(outbox.settings, "cdc", seconds=60, say=lambda line: None)
        proxy.swallow_answers()
        outbox.write("b")
    remove(outbox.settings, seconds=_SLOT_SECONDS, say=lambda line: None)


@pytest.mark.extended
def test_a_relay_of_a_marked_table_ends(stack: Stack, tmp_path: Path, proxy: Proxy) -> None:
    """Guards against claims and marks without an answer."""
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    with fresh_database(stack.dsn) as dsn:
        table = textbook.make(dsn, stack.kafka, f"{topic_prefix()}-events", *shape)
        with _stopped(lambda stop: service.relay(_through(table.outbox, proxy), stop=stop), proxy):
            table.write(("a", {"n": 1}))
            wait_until(lambda: not table.pending(), what="a mark")
            proxy.swallow_answers()
            table.write(("b", {"n": 2}))


def test_a_lock_in_the_way_keeps_no_shard(outbox: Outbox, proxy: Proxy) -> None:
    """Guards against a relay that has ended and still owns its shard, because its statement waits."""
    with outbox.connect(autocommit=False) as other:
        with _stopped(lambda stop: service.relay(_through(outbox, proxy), stop=stop), proxy):
            wait_until(lambda: owners(outbox) != [None], what="a relay")
            other.execute("SELECT FROM outbox_shards FOR UPDATE")
            outbox.write("a")
            wait_until(lambda: bool(_waiting(outbox)), what="a statement that waits")
        wait_until(lambda: not _is_held(outbox, "outbox_shards"), what="the shard to be free")


def test_a_standby_ends(outbox: Outbox, proxy: Proxy) -> None:
    """Guards against a relay that has no shard, and waits for an answer."""
    taken = threading.Event()
    with _stopped(
        lambda stop: service.relay(outbox.settings, stop=stop, on_take=lambda shard: taken.set()), proxy
    ):
        assert taken.wait(600)
        with _stopped(lambda stop: service.relay(_through(outbox, proxy), stop=stop), proxy):
            wait_until(lambda: _is_held(outbox, "outbox_shards.next"), what="the standby to wait")
            proxy.swallow_answers()


def _is_held(outbox: Outbox, name: str) -> bool:
    lock = {"lock": f"{outbox.settings.db_schema}.{name}", "shard": 0}
    with outbox.connect() as connection:
        return connection.execute(relay_sql.LOCK_IS_HELD, lock).fetchone() == (True,)


@pytest.mark.extended
def test_a_relay_that_starts_ends(outbox: Outbox, proxy: Proxy) -> None:
    """Guards against an error, or a wait, where the answers were lost before there was a shard."""
    proxy.swallow_answers()
    with _stopped(lambda stop: service.relay(_through(outbox, proxy), stop=stop), proxy):
        wait_until(lambda: proxy.connections > 0, what="a connection")


@pytest.mark.extended
def test_a_fleet_ends(outbox: Outbox, proxy: Proxy) -> None:
    """Guards against a process with several outboxes of which one waits for an answer."""
    with _stopped(lambda stop: relay_all([_through(outbox, proxy)], stop=stop), proxy):
        outbox.write("a")
        wait_until(lambda: [message.key for message in outbox.messages()] == ["a"], what="an event")
        proxy.swallow_answers()
        outbox.write("b")


def test_a_reader_that_is_lost_after_a_stop_is_no_crash(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against published events that are not settled because nothing reads any more."""
    name = "outbox relay: reader"
    stop = threading.Event()
    with ThreadPoolExecutor() as threads, ExitStack() as ends:
        ends.callback(stop.set)
        relay = threads.submit(service.relay, outbox.settings, stop=stop)
        wait_until(lambda: owners(outbox) != [None], what="a relay")
        outbox.write("a")
        wait_until(lambda: bool(outbox.messages()), what="an event")
        with outbox.connect(autocommit=False) as other:
            other.execute("LOCK TABLE outbox")
            wait_until(lambda: name in _waiting(outbox), what="the reader to wait")
            stop.set()
            other.execute("SELECT pg_terminate_backend(%s)", [_waiting(outbox)[name]])
            wait_until(lambda: name not in _waiting(outbox), what="the reader to be lost")
        assert relay.result(600).events == 1
    assert "stopped while" not in caplog.text


def _waiting(outbox: Outbox) -> dict[str, int]:
    """The sessions that wait for a lock, and their pids."""
    with outbox.connect() as connection:
        return dict(
            connection.execute(
                "SELECT application_name, pid FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )


def test_before_a_stop_an_answer_may_take_any_time(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a session that is closed because a statement waits for a lock."""
    monkeypatch.setattr(answers, "PATIENCE", 0.05)
    stop = threading.Event()
    with limited_after(stop), Session.connect(outbox.settings.require_dsn()) as connection:
        assert connection.execute("SELECT 1 FROM pg_sleep(0.4)").fetchone() == (1,)
        stop.set()
        with pytest.raises(psycopg.OperationalError, match="no answer of the database"):
            connection.execute("SELECT pg_sleep(30)")
        assert connection.closed


@pytest.mark.extended
def test_late_answers_count_together(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stop that takes as many times the limit as it has statements."""
    monkeypatch.setattr(answers, "PATIENCE", 1.0)
    stop = threading.Event()
    stop.set()
    with limited_after(stop), Session.connect(outbox.settings.require_dsn()) as connection:
        for _ in range(2):
            connection.execute("SELECT pg_sleep(0.4)")
        with pytest.raises(psycopg.OperationalError, match="no answer of the database for 1 s"):
            connection.execute("SELECT pg_sleep(0.4)")
        assert connection.closed
