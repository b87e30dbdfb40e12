"""Published rows are removed, and no others; locks are short; the plan reads each block once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import sql

from outbox_pipelines.database import connect
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import cleaning_sql, published_rows
from outbox_pipelines.existing.cleaning.clean_up import clean
from outbox_pipelines.existing.cleaning.published_rows import Deleter, Versions
from outbox_pipelines.existing.cleaning.target import find_target
from tests.conftest import wait_until
from tests.existing import guides, textbook
from tests.existing.cleaning.conftest import SOME, Cleaning, Make
from tests.existing.conftest import FEW_GUIDES

_NUMBERS = "SELECT (payload ->> 'n')::int FROM events ORDER BY 1"


def _numbers(cleaning: Cleaning) -> list[int]:
    return [n for (n,) in cleaning.execute(_NUMBERS)]


def test_only_what_was_published_long_ago(cleaning: Cleaning) -> None:
    """Guards against a lost event: pending rows and dead letters stay, whatever their age."""
    cleaning.execute("UPDATE events SET created_at = now() - interval '1 year'")
    assert cleaning.clean().deleted == 10
    assert _numbers(cleaning) == list(range(11, 23))
    assert cleaning.clean().deleted == 0
    if cleaning.settings.archive != "none":
        assert cleaning.archived("(payload::json ->> 'n')::int, retry_count") == [
            (n, "0") for n in range(1, 11)
        ]


def test_words_of_its_own(make: Make) -> None:
    """Guards against a status that counts as published because it is none of the known ones."""
    cleaning = make(textbook.STATUS, textbook.STATUS_MAPPING)
    for state in ("new", "sent", "broken"):
        cleaning.execute(
            "INSERT INTO events (kind, entity, name, body, state, sent_at, broken_at, made_at) VALUES "
            f"('k', gen_random_uuid(), 'n', '{{}}', '{state}', now() - interval '1 day', now(), "
            "now() - interval '1 day')"
        )
    assert cleaning.clean().deleted == 1
    assert cleaning.execute("SELECT state::text FROM events ORDER BY 1") == [("broken",), ("new",)]


@pytest.mark.parametrize("guide", FEW_GUIDES, ids=lambda guide: guide.name)
def test_tables_of_guides(guide: guides.Guide, make: Make) -> None:
    cleaning = make(guide.ddl, guide.mapping, clean_after_hours=0.0, **guide.settings)
    with cleaning.connect() as connection:
        for n in range(4):
            key = "00000000-0000-0000-0000-000000000001"
            guide.writers[0](connection, key, "order.created", {"n": n})
    assert cleaning.clean().deleted == 0
    cleaning.table.drain()
    assert cleaning.clean().deleted == 4


@pytest.mark.extended
def test_a_table_of_many_blocks(make: Make) -> None:
    """Guards against rows between two windows, or in the last one."""
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    cleaning.table.fill(40_000)
    cleaning.execute("UPDATE events SET published_at = now() - interval '1 day' WHERE seq % 100 > 0")
    cleaned = cleaning.clean()
    assert cleaned.deleted == 39_600
    assert cleaning.execute("SELECT count(*), min(seq), max(seq) FROM events") == [(400, 100, 40_000)]


@pytest.mark.extended
def test_relay_and_writers_continue(make: Make) -> None:
    """Guards against an event that is removed before it is published, or a clean-up that stops the relay."""
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING, clean_after_hours=0.0)
    stop = threading.Event()
    deleted = []

    def run() -> None:
        while not stop.is_set():
            deleted.append(clean(cleaning.settings, stop).deleted)

    with cleaning.table.relayed():
        thread = threading.Thread(target=run)
        thread.start()
        try:
            for _ in range(20):
                cleaning.table.fill(1_000)
            wait_until(lambda: not cleaning.table.pending(), what="the relay")
        finally:
            stop.set()
            thread.join()
    assert cleaning.clean().deleted + sum(deleted) == 20_000
    assert len(cleaning.table.messages()) == 20_000


def test_a_locked_row_is_left(cleaning: Cleaning) -> None:
    """Guards against a clean-up that waits for a session of an application, and against a lost row."""
    with cleaning.connect(autocommit=False) as holder:
        holder.execute("SELECT FROM events WHERE payload ->> 'n' = '3' FOR UPDATE")
        if cleaning.settings.archive == "none":
            assert cleaning.clean().deleted == 9
        else:
            with pytest.raises(
                NotReadyError, match=r"^not deleted: 1 archived row of public.events, locked by other"
            ):
                cleaning.clean()
        assert _numbers(cleaning) == [3, *range(11, 23)]
    assert cleaning.clean().deleted == 1
    if cleaning.settings.archive != "none":
        assert cleaning.archived("(payload::json ->> 'n')::int") == [(n,) for n in range(1, 11)]


def test_a_row_that_was_changed_meanwhile_stays(cleaning: Cleaning) -> None:
    """Guards against a version that was never archived, or was set to pending again."""
    with connect(cleaning.settings, name="test") as connection:
        target = find_target(connection, cleaning.settings)
        (leaf,) = published_rows.leaves(connection, target)
        given = {"start": published_rows.place(0), "end": published_rows.place(leaf.blocks)}
        found = connection.execute(target.statement(cleaning_sql.ROWS, leaf.name), given).fetchall()
        assert len(found) == 10
        cleaning.execute("UPDATE events SET published_at = NULL WHERE payload ->> 'n' = '1'")
        cleaning.execute("UPDATE events SET last_error = 'x' WHERE payload ->> 'n' = '2'")
        deleter = Deleter(connection, target, threading.Event())
        # Another row may have the place by now, even another version of the same one.
        others = Versions([row[0] for row in found], ["3"] * 10, [row[2] for row in found])
        assert deleter.delete(leaf.name, others) == 0
        assert deleter.delete(leaf.name, Versions(*map(list, zip(*found, strict=True)))) == 8
    assert _numbers(cleaning) == [1, 2, *range(11, 23)]


@pytest.mark.extended
def test_a_batch_that_takes_long_is_canceled_and_made_smaller(make: Make) -> None:
    """Guards against locks of more than 50 ms: each row takes 4 ms here."""
    slow = """;
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep(0.004); RETURN OLD; END $$;
        CREATE TRIGGER slow BEFORE DELETE ON events FOR EACH ROW EXECUTE FUNCTION slow()"""
    cleaning = make(textbook.PUBLISHED_AT + slow, textbook.PUBLISHED_AT_MAPPING)
    cleaning.execute(SOME.replace("22", "122").replace("<= 10", "<= 110"))
    canceled: list[Any] = []
    execute = Deleter._execute

    def watched(self: Deleter, *given: Any) -> int:
        try:
            return execute(self, *given)
        except psycopg.errors.QueryCanceled:
            canceled.append(given)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "_execute", watched)
        assert cleaning.clean().deleted == 110
    assert canceled


def test_a_row_that_cannot_be_deleted_in_time_is_named(make: Make) -> None:
    slow = """;
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep(0.2); RETURN OLD; END $$;
        CREATE TRIGGER slow BEFORE DELETE ON events FOR EACH ROW EXECUTE FUNCTION slow()"""
    cleaning = make(textbook.PUBLISHED_AT + slow, textbook.PUBLISHED_AT_MAPPING)
    cleaning.execute(SOME)
    with pytest.raises(NotReadyError, match=r"deleting one row of public.events takes more than 40 ms: look"):
        cleaning.clean()


@pytest.mark.extended
def test_no_statement_reads_the_table_as_a_whole(make: Make) -> None:
    """Guards against a scan for each batch: rows are found by their place, however many there are."""
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    cleaning.table.fill(50_000)
    cleaning.execute("UPDATE events SET published_at = now() - interval '1 day'; ANALYZE events")
    with connect(cleaning.settings, name="test") as connection:
        target = find_target(connection, cleaning.settings)
        (leaf,) = published_rows.leaves(connection, target)
        block = {"start": published_rows.place(leaf.blocks - 256), "end": published_rows.place(leaf.blocks)}
        found = connection.execute(target.statement(cleaning_sql.ROWS, leaf.name), block).fetchall()
        assert len(found) >= 5_000
        places, transactions, ids = zip(*found[:5_000], strict=True)
        versions = {"places": list(places), "transactions": list(transactions), "ids": list(ids)}
        for query, given in (
            (cleaning_sql.ROWS, block),
            (cleaning_sql.COUNT, block),
            (cleaning_sql.DELETE, versions),
            (cleaning_sql.STILL, versions),
        ):
            explain = b"EXPLAIN " + target.statement(query, leaf.name).as_bytes()
            plan = "\n".join(line for (line,) in connection.execute(explain, given))
            assert "Seq Scan" not in plan, plan
            assert "Tid" in plan


def test_a_locked_table(cleaning: Cleaning) -> None:
    """Guards against a message about a trigger that is not there."""
    delete = Deleter.delete

    def beside_a_lock(self: Deleter, leaf: sql.Identifier, versions: Versions) -> int:
        with cleaning.connect(autocommit=False) as holder:
            holder.execute("LOCK TABLE events IN SHARE MODE")
            return delete(self, leaf, versions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_rows, "ATTEMPTS", 2)
        patch.setattr(Deleter, "delete", beside_a_lock)
        with pytest.raises(NotReadyError, match=r"^another session locks public.events, or rows"):
            cleaning.clean()
    assert cleaning.clean().deleted == 10


def test_a_slow_network(make: Make) -> None:
    """Guards against batches of one row because an answer takes long, although no lock is held for it."""
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    cleaning.table.fill(3_000)
    cleaning.execute("UPDATE events SET published_at = now() - interval '1 day'")
    batches: list[int] = []
    execute = Deleter._execute
    # Only the network takes time: a busy machine must not count as a table that is locked for long.
    clock = SimpleNamespace(seconds=0.0)

    def answered_late(self: Deleter, statement: sql.Composed, given: dict[str, list[str]]) -> int:
        batches.append(execute(self, statement, given))
        clock.seconds += 0.06
        return batches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "_execute", answered_late)
        patch.setattr(Deleter, "_seconds_of_nothing", lambda self: 0.06)
        patch.setattr(published_rows, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
        assert cleaning.clean().deleted == 3_000
    # With the network's part, each batch would be half of the one before.
    assert batches == sorted(batches[:-1]) + batches[-1:], batches


def test_no_transaction_is_open_between_statements(cleaning: Cleaning) -> None:
    """Guards against locks that stay because this process or the network has stopped."""
    states: list[str] = []
    execute = Deleter._execute

    def watched(self: Deleter, statement: sql.Composed, given: dict[str, list[str]]) -> int:
        count = execute(self, statement, given)
        query = "SELECT state FROM pg_stat_activity WHERE pid = %s"
        states.extend(state for (state,) in cleaning.execute(query, self.connection.info.backend_pid))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "_execute", watched)
        assert cleaning.clean().deleted == 10
    assert set(states) == {"idle"}


@pytest.mark.extended
def test_one_at_a_time(cleaning: Cleaning) -> None:
    with connect(cleaning.settings, name="test") as connection:
        oid = find_target(connection, cleaning.settings).oid
        connection.execute("SELECT pg_advisory_lock(%s)", [0x6F62_7805 << 32 | oid])
        with pytest.raises(NotReadyError, match=r"events is being cleaned by session \d+ of role .* \(test"):
            cleaning.clean()
    assert cleaning.clean().deleted == 10
