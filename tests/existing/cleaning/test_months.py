"""Whole months are dropped only when all of their rows are published, and archived if that is asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.days.archive import rows
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import clean_up
from outbox_pipelines.existing.cleaning.clean_up import Cleaned, clean
from tests.conftest import wait_until
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING, Cleaning, Make

# Three published rows in each of the months that have ended.
ROWS = """
INSERT INTO events (created_at, published_at, payload)
SELECT at + n * interval '1 day', at + n * interval '1 day', jsonb_build_object('n', n)
FROM generate_series(1, 3) n, unnest(ARRAY['2026-01-01Z', '2026-02-01Z']::timestamptz[]) at"""


@pytest.fixture(params=["none", "archived"])
def partitioned(make: Make, request: pytest.FixtureRequest, tmp_path: Path) -> Cleaning:
    archive = "none" if request.param == "none" else str(tmp_path / "archive")
    made = make(MONTHS, MONTHS_MAPPING, archive=archive)
    made.execute(ROWS)
    return made


def _partitions(cleaning: Cleaning) -> list[str]:
    query = "SELECT relid::regclass::text FROM pg_partition_tree('events') WHERE isleaf ORDER BY 1"
    return [name for (name,) in cleaning.execute(query)]


def test_months_with_published_rows_are_dropped(partitioned: Cleaning) -> None:
    cleaned = partitioned.clean()
    assert cleaned.dropped == ["public.events_01", "public.events_02"]
    assert cleaned.deleted == 0
    assert _partitions(partitioned) == ["events_03"]
    assert partitioned.execute("SELECT to_regclass('events_01')") == [(None,)]
    if partitioned.settings.archive != "none":
        assert len(cleaned.files) == 2
        assert len(partitioned.archived("id")) == 6
    assert partitioned.clean().dropped == []


@pytest.mark.parametrize("delivery", ["pending", "young"])
def test_a_month_with_other_rows_stays(partitioned: Cleaning, delivery: str) -> None:
    """Guards against a lost event. Its published rows are removed one by one."""
    mark = {"pending": "NULL", "young": "now()"}[delivery]
    partitioned.execute(
        f"UPDATE events SET published_at = {mark} WHERE created_at = '2026-01-02Z' AND payload ->> 'n' = '1'"
    )
    cleaned = partitioned.clean()
    assert cleaned.dropped == ["public.events_02"]
    reason = {"pending": "1 row not published", "young": "1 row published too recently"}[delivery]
    assert cleaned.notes[0].startswith(f"public.events_01: {reason}")
    assert cleaned.deleted == 2
    assert partitioned.execute("SELECT count(*) FROM events_01") == [(1,)]


def test_a_default_partition_stays(make: Make) -> None:
    cleaning = make(f"{MONTHS}; CREATE TABLE others PARTITION OF events DEFAULT", MONTHS_MAPPING)
    cleaning.execute(ROWS.replace("2026-02-01Z", "2025-01-01Z"))
    cleaned = cleaning.clean()
    assert cleaned.dropped == ["public.events_01", "public.events_02"]
    assert cleaned.deleted == 3
    assert _partitions(cleaning) == ["events_03", "others"]


def test_an_event_that_is_written_before_the_lock_is_kept(make: Make) -> None:
    """Guards against the time between the look at a month and its lock."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(ROWS)
    found = clean_up._why_kept

    def meanwhile(*given: Any, **named: Any) -> str:
        reason = found(*given, **named)
        cleaning.execute("INSERT INTO events (created_at) VALUES ('2026-01-10Z')")
        return reason

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean_up, "_why_kept", meanwhile)
        cleaned = cleaning.clean()
    # Looking at the second month came after an event for the first one again.
    assert cleaned.dropped == ["public.events_02"]
    assert cleaning.execute("SELECT count(*) FROM events_01 WHERE published_at IS NULL") == [(2,)]


def test_writers_do_not_wait_behind_it(make: Make) -> None:
    """Guards against a lock that queues all writers behind one long transaction."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(ROWS)
    results: list[Cleaned] = []
    with cleaning.connect(autocommit=False) as holder:
        holder.execute("SELECT count(*) FROM events")
        thread = threading.Thread(target=lambda: results.append(clean(cleaning.settings)))
        thread.start()
        with cleaning.connect() as writer:
            # In an attempt an INSERT waits for at most 50 ms; this is far more than that.
            writer.execute("SET statement_timeout = '2s'")
            for _ in range(50):
                writer.execute("INSERT INTO events (created_at) VALUES (now())")
        holder.rollback()
    thread.join()
    assert results[0].dropped == ["public.events_01", "public.events_02"]


def test_nothing_changes_while_a_transaction_holds_the_table(make: Make) -> None:
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(ROWS)
    with pytest.MonkeyPatch.context() as patch, cleaning.connect(autocommit=False) as holder:
        patch.setattr(clean_up, "ATTEMPTS", 2)
        holder.execute("SELECT count(*) FROM events")
        cleaned = cleaning.clean()
    assert cleaned.dropped == []
    assert "public.events_01: transactions hold the table" in cleaned.notes[0]
    # Row by row they can go.
    assert cleaned.deleted == 6


def test_a_detached_month_with_an_event_is_not_dropped(make: Make) -> None:
    """Guards against a session that writes into the partition by its own name."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(ROWS)
    remark = "outbox table clean: detached from public.events, all rows published; to be dropped"
    cleaning.execute(
        "ALTER TABLE events DETACH PARTITION events_01; "
        f"COMMENT ON TABLE events_01 IS '{remark}'; INSERT INTO events_01 (created_at) VALUES ('2026-01-10Z')"
    )
    cleaned = cleaning.clean()
    assert "events_01: detached, with 1 row not published: attach it again" in cleaned.notes[0]
    assert cleaning.execute("SELECT count(*) FROM events_01") == [(4,)]
    cleaning.execute("DELETE FROM events_01 WHERE published_at IS NULL")
    assert cleaning.clean().dropped == ["public.events_01"]


def test_a_file_that_differs_drops_nothing(make: Make, tmp_path: Path) -> None:
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    cleaning.execute(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "sum_of_file", lambda *_: (3, 1))
        with pytest.raises(NotReadyError, match="and their archive file differ"):
            cleaning.clean()
    assert cleaning.execute("SELECT count(*) FROM events_01") == [(3,)]
    assert len(cleaning.clean().dropped) == 2
    assert len(cleaning.archived("id")) == 6


def test_other_tables_stay(make: Make) -> None:
    """Guards against a drop of a table that happens to have a comment."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute("CREATE TABLE precious (id int); COMMENT ON TABLE precious IS 'outbox table clean'")
    cleaning.clean()
    with cleaning.connect() as connection, pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT FROM imprecious")
    assert cleaning.execute("SELECT count(*) FROM precious") == [(0,)]


def test_months_without_rows_are_dropped_after_their_end(make: Make) -> None:
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.clean()
    wait_until(lambda: _partitions(cleaning) == ["events_03"])
