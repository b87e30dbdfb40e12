"""What keeps a month is a note, not a failure, and no statement waits long for its drop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import clean_up
from outbox_pipelines.existing.cleaning.clean_up import Cleaned, clean
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING, Make
from tests.existing.cleaning.test_months import ROWS

_REMARK = "outbox table clean: detached from public.events, all rows published; to be dropped"
_COLUMN = "published_at timestamptz"


def test_a_state_of_another_publisher(make: Make) -> None:
    """Guards against a row that is neither pending nor failed, written between the look and the lock."""
    ddl = MONTHS.replace(_COLUMN, "status text NOT NULL DEFAULT 'PROCESSED', processed_at timestamptz")
    cleaning = make(
        ddl.replace("WHERE published_at IS NULL", "WHERE status = 'PENDING'"),
        MONTHS_MAPPING.replace(
            'published_at = "published_at"', 'status = "status"\nprocessed_at = "processed_at"'
        ),
    )
    cleaning.execute(ROWS.replace("published_at", "processed_at"))
    found = clean_up._why_kept

    def meanwhile(*given: Any, **named: Any) -> str:
        reason = found(*given, **named)
        cleaning.execute("INSERT INTO events (created_at, status) VALUES ('2026-01-10Z', 'PROCESSING')")
        return reason

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean_up, "_why_kept", meanwhile)
        cleaned = cleaning.clean()
    assert cleaned.notes == ["public.events_01: a row that is not published was written during the clean-up"]
    assert cleaning.execute("SELECT count(*) FROM events WHERE status = 'PROCESSING'") == [(2,)]


@pytest.mark.extended
def test_a_table_that_it_references_is_not_blocked(make: Make) -> None:
    """Guards against a DROP that waits, with all statements of the referenced table behind it."""
    references = f"{_COLUMN}, order_id int DEFAULT 1 REFERENCES orders"
    cleaning = make(
        "CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (1); "
        + MONTHS.replace(_COLUMN, references),
        MONTHS_MAPPING,
    )
    cleaning.execute(ROWS)
    results: list[Cleaned] = []
    with cleaning.connect(autocommit=False) as holder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean_up, "ATTEMPTS", 10)
        holder.execute("SELECT FROM orders")
        thread = threading.Thread(target=lambda: results.append(clean(cleaning.settings)))
        thread.start()
        with cleaning.connect() as reader:
            # It waits for at most 50 ms at a time; this is far more than that.
            reader.execute("SET statement_timeout = '2s'")
            while thread.is_alive():
                reader.execute("SELECT FROM orders")
        holder.rollback()
    thread.join()
    assert results[0].dropped == []
    reason = "detached, and transactions hold it or a table that it references: the next run drops it"
    assert results[0].notes == [f"public.events_01: {reason}", f"public.events_02: {reason}"]
    assert cleaning.clean().dropped == ["public.events_01", "public.events_02"]


def test_a_view_of_a_month(make: Make) -> None:
    """Guards against a month that is detached and cannot be dropped, at which all runs would fail."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(ROWS)
    cleaning.execute("CREATE VIEW report AS SELECT * FROM events_01")
    cleaned = cleaning.clean()
    assert cleaned.notes == ["public.events_01: rule _RETURN on view report depends on it: drop that first"]
    assert cleaned.dropped == ["public.events_02"]
    assert cleaned.deleted == 3
    # Made after the detach.
    cleaning.execute(
        f"ALTER TABLE events DETACH PARTITION events_01; COMMENT ON TABLE events_01 IS '{_REMARK}'"
    )
    assert "events_01: detached, and cannot drop table events_01" in cleaning.clean().notes[0]
    cleaning.execute("DROP VIEW report")
    assert cleaning.clean().dropped == ["public.events_01"]


def test_rows_that_another_table_references(make: Make) -> None:
    cleaning = make(MONTHS.replace(_COLUMN, f"{_COLUMN}, PRIMARY KEY (id, created_at)"), MONTHS_MAPPING)
    cleaning.execute(ROWS)
    cleaning.execute(
        "CREATE TABLE audit (id uuid, created_at timestamptz, FOREIGN KEY (id, created_at) REFERENCES events "
        "ON DELETE CASCADE); CREATE INDEX ON audit (id, created_at); "
        "INSERT INTO audit SELECT id, created_at FROM events_01"
    )
    cleaned = cleaning.clean()
    assert cleaned.notes[0].startswith(
        'public.events_01: removing partition "events_01" violates foreign key'
    )
    assert cleaned.dropped == ["public.events_02"]
    assert cleaned.deleted == 3
    assert cleaning.clean().dropped == ["public.events_01"]


def test_a_row_that_a_foreign_key_keeps(make: Make) -> None:
    """Guards against a line that does not say which table, and what to do."""
    cleaning = make(MONTHS.replace(_COLUMN, f"{_COLUMN}, PRIMARY KEY (id, created_at)"), MONTHS_MAPPING)
    cleaning.execute(ROWS)
    cleaning.execute(
        "CREATE TABLE audit (id uuid, created_at timestamptz, "
        "FOREIGN KEY (id, created_at) REFERENCES events);"
        "CREATE INDEX ON audit (id, created_at); INSERT INTO audit SELECT id, created_at FROM events_01"
    )
    with pytest.raises(
        NotReadyError, match=r"events cannot be deleted: .* on table \"audit\": remove the rows"
    ):
        cleaning.clean()
    cleaning.execute("TRUNCATE audit")
    assert cleaning.clean().dropped == ["public.events_01"]


def test_a_role_that_does_not_own_the_table(make: Make) -> None:
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(ROWS)
    with cleaning.role("SELECT, UPDATE, DELETE ON events, events_01, events_02, events_03") as dsn:
        cleaned = cleaning.clean(dsn=dsn)
    assert cleaned.deleted == 6
    assert cleaned.dropped == []
    assert cleaned.notes[0].startswith("partitions of public.events are not dropped, their rows are deleted")
    assert "run the clean-up as postgres, or GRANT postgres TO cleaner_" in cleaned.notes[0]


def test_a_month_that_was_attached_again(make: Make) -> None:
    """Guards against the drop of a month that an operator detaches later, to keep it."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(f"COMMENT ON TABLE events_03 IS '{_REMARK}'")
    cleaning.clean()
    cleaning.execute("ALTER TABLE events DETACH PARTITION events_03")
    cleaning.clean()
    assert cleaning.execute("SELECT to_regclass('events_03')::text") == [("events_03",)]


def test_a_detached_month_that_is_written_by_its_own_name(make: Make, tmp_path: Path) -> None:
    """Guards against an event that is written between the look at a detached month and its drop."""
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    cleaning.execute(ROWS)
    archived = clean_up._archive

    def beside_a_writer(*given: Any) -> str:
        insert = sql.SQL("INSERT INTO {} (created_at) VALUES ('2026-01-10Z')").format(given[3])
        with cleaning.connect() as writer:
            writer.execute("SET lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                writer.execute(insert)
        return archived(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean_up, "_archive", beside_a_writer)
        assert cleaning.clean().dropped == ["public.events_01", "public.events_02"]


def test_the_newest_month_stays(make: Make) -> None:
    """Guards against a table without a month: pg_partman derives the next one from the last."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute("DROP TABLE events_03")
    cleaning.execute(ROWS)
    cleaned = cleaning.clean()
    assert cleaned.dropped == ["public.events_01"]
    assert cleaned.deleted == 3
    assert cleaned.notes[0].startswith("public.events_02: no later partition exists, and this one stays")


def test_a_month_that_has_just_ended(make: Make) -> None:
    """Guards against the failure of a transaction that began before its end and still writes into it."""
    cleaning = make(MONTHS, MONTHS_MAPPING, clean_after_hours=0.0)
    ((end, start),) = cleaning.execute(
        "SELECT (now() - interval '23 hours')::text, (now() - interval '25 hours')::text"
    )
    cleaning.execute(
        "DROP TABLE events_03; "
        f"CREATE TABLE events_03 PARTITION OF events FOR VALUES FROM ('2026-03-01Z') TO ('{start}'); "
        f"CREATE TABLE events_04 PARTITION OF events FOR VALUES FROM ('{start}') TO ('{end}'); "
        f"CREATE TABLE events_05 PARTITION OF events FOR VALUES FROM ('{end}') TO ('2126-03-01Z')"
    )
    assert cleaning.clean().dropped == ["public.events_01", "public.events_02", "public.events_03"]


def test_tables_that_inherit(make: Make) -> None:
    """Guards against rows that stay without a word: partitions of pg_partman's old kind."""
    cleaning = make(
        f"{MONTHS.split(' PARTITION BY', 1)[0]}; CREATE TABLE child () INHERITS (events)", MONTHS_MAPPING
    )
    cleaning.execute("INSERT INTO child (created_at, published_at) VALUES ('2026-01-01Z', '2026-01-01Z')")
    cleaned = cleaning.clean()
    assert cleaned.notes[0].startswith("rows stay in 1 table that inherit from public.events")
