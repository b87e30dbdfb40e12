"""What others do to the table, to what refers to it, and to the server, while it is cleaned."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.archive.store import Store
from outbox_pipelines.cleaning.clean import Cleaned, clean
from outbox_pipelines.cleaning.rows import Deleter
from tests.cleaning.conftest import MONTHS, MONTHS_MAPPING, SOME, Make
from tests.cleaning.test_months import _ROWS
from tests.relay.marked_table import textbook


def test_rows_of_a_file_that_waits_are_not_in_the_file_of_their_month(make: Make, tmp_path: Path) -> None:
    """Guards against rows in two files after a kill, when their month can be dropped by then."""
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    cleaning.execute(_ROWS)
    cleaning.execute("UPDATE events SET published_at = NULL WHERE created_at = '2026-01-02Z'")

    def die(*_: Any) -> int:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            cleaning.clean()
    cleaning.execute("UPDATE events SET published_at = created_at WHERE published_at IS NULL")
    cleaning.clean()
    found = cleaning.archived("id")
    assert len(found) == len(set(found)) == 6


def test_a_file_gets_its_name_when_the_deletion_is_on_disk(make: Make, tmp_path: Path) -> None:
    """Guards against rows that a crash of the server brings back, and that are archived again."""
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING, archive=str(tmp_path / "archive"))
    cleaning.execute(SOME)
    seen: list[Any] = []
    execute, rename = Deleter._execute, Store.rename

    def deleted(self: Deleter, *given: Any) -> int:
        count = execute(self, *given)
        seen.append(cleaning.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        return count

    def renamed(self: Store, name: str, target: str) -> None:
        if target.startswith("tables/"):
            seen.append(cleaning.execute("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", seen[-1])[0][0])
        rename(self, name, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "_execute", deleted)
        patch.setattr(Store, "rename", renamed)
        cleaning.clean()
    assert seen[-1] is True


def test_readers_of_a_table_to_which_a_month_refers_do_not_wait(make: Make) -> None:
    """Guards against a drop that waits for a lock on another table, with all its users behind it."""
    refers = MONTHS.replace(
        "published_at timestamptz", "published_at timestamptz, order_id int DEFAULT 1 REFERENCES orders"
    )
    cleaning = make(
        f"CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (1); {refers}", MONTHS_MAPPING
    )
    cleaning.execute(_ROWS)
    results: list[Cleaned] = []
    longest = 0.0
    with cleaning.connect(autocommit=False) as holder, cleaning.connect() as reader:
        holder.execute("SELECT FROM orders")
        thread = threading.Thread(target=lambda: results.append(clean(cleaning.settings)))
        thread.start()
        for _ in range(200):
            began = time.monotonic()
            reader.execute("SELECT FROM orders")
            longest = max(longest, time.monotonic() - began)
        holder.rollback()
    thread.join()
    # Far more than an attempt takes, far less than it would wait for the holder.
    assert longest < 1.0
    assert results[0].dropped == ["public.events_01", "public.events_02"]


def test_what_depends_on_a_month_is_named(make: Make) -> None:
    """Guards against a stack trace, and a month that is lost from view."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(_ROWS)
    cleaning.execute("CREATE VIEW report AS SELECT * FROM events_01")
    cleaned = cleaning.clean()
    assert cleaned.dropped == ["public.events_02"]
    assert cleaned.notes == [
        "public.events_01: detached, and cannot be dropped: cannot drop table events_01 because other "
        "objects depend on it"
    ]
    cleaning.execute("DROP VIEW report")
    assert cleaning.clean().dropped == ["public.events_01"]


def test_a_month_to_which_another_table_refers_stays(make: Make) -> None:
    cleaning = make(
        MONTHS.replace("published_at timestamptz", "published_at timestamptz, PRIMARY KEY (id, created_at)"),
        MONTHS_MAPPING,
    )
    cleaning.execute(_ROWS)
    cleaning.execute(
        "CREATE TABLE refs (id uuid, created_at timestamptz, FOREIGN KEY (id, created_at) REFERENCES events "
        "ON DELETE CASCADE); INSERT INTO refs SELECT id, created_at FROM events "
        "WHERE created_at < '2026-02-01Z'"
    )
    cleaned = cleaning.clean()
    assert cleaned.dropped == ["public.events_02"]
    assert cleaned.notes[0].startswith("public.events_01: it cannot be detached: ")


def test_a_role_that_does_not_own_the_table_removes_rows_alone(make: Make) -> None:
    cleaning = make(MONTHS, MONTHS_MAPPING)
    cleaning.execute(_ROWS)
    name = "cleaner_" + cleaning.execute("SELECT current_database()")[0][0]
    cleaning.execute(f"CREATE ROLE {name}; GRANT {name} TO CURRENT_USER")
    try:
        cleaning.execute(f"GRANT SELECT, UPDATE, DELETE ON events, events_01, events_02, events_03 TO {name}")
        dsn = str(cleaning.settings.dsn.reveal())
        cleaned = cleaning.clean(dsn=type(cleaning.settings.dsn)(f"{dsn} options='-c role={name}'"))
        assert cleaned.deleted == 6
        assert "events_01: it cannot be detached: must be owner of" in cleaned.notes[0]
    finally:
        cleaning.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")
