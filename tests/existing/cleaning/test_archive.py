"""Rows are in one file each, whatever happens between the file and the deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import cleaning_sql, published_rows
from outbox_pipelines.existing.cleaning.published_rows import Deleter
from tests.existing import textbook
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING, SOME, Cleaning, Make


@pytest.fixture
def archived(make: Make, tmp_path: Path) -> Cleaning:
    made = make(
        # Other publishers may have published rows without an id.
        textbook.PUBLISHED_AT.replace("id uuid NOT NULL", "id uuid"),
        textbook.PUBLISHED_AT_MAPPING,
        archive=str(tmp_path / "archive"),
    )
    made.execute(SOME)
    return made


class _KilledError(Exception):
    """In place of a crash."""


def _crash(*_: object) -> int:
    raise _KilledError


def test_rows_that_wait_and_then_their_month(make: Make, tmp_path: Path) -> None:
    """Guards against rows in the file of a killed run, and again in that of their month."""
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    cleaning.execute(
        "INSERT INTO events (created_at, published_at) "
        "SELECT at, CASE WHEN n > 1 THEN at END FROM generate_series(1, 3) n, "
        "unnest(ARRAY['2026-01-02Z']::timestamptz[]) at"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "delete", _crash)
        with pytest.raises(_KilledError):
            cleaning.clean()
    cleaning.execute("UPDATE events SET published_at = created_at WHERE published_at IS NULL")
    assert "public.events_01" in cleaning.clean().dropped
    found = cleaning.archived("id")
    assert len(found) == len(set(found)) == 3


def test_a_row_without_an_id(archived: Cleaning) -> None:
    """Guards against a row that no run can delete, so that none comes to its end."""
    archived.execute("UPDATE events SET id = NULL WHERE seq = 1")
    assert archived.clean().deleted == 10
    assert len(archived.archived("seq")) == 10


def test_a_file_has_its_name_when_the_deletion_is_on_disk(archived: Cleaning) -> None:
    """Guards against rows that a crash of the server brings back, and that are then in two files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning_sql, "IS_ON_DISK", "SELECT %(written)s::pg_lsn IS NULL")
        patch.setattr(published_rows, "_MOST_SECONDS_TO_DISK", 0.1)
        with pytest.raises(NotReadyError, match=r"has not yet written to disk .*: the next run continues"):
            archived.clean()
    assert archived.execute("SELECT count(*) FROM events WHERE seq <= 10") == [(0,)]
    assert not list(archived.archive.glob("tables/**/*.parquet"))
    archived.clean()
    assert len(archived.archived("seq")) == 10


def test_two_databases_with_one_archive(archived: Cleaning) -> None:
    """Guards against a run that completes the file of another database, whose rows are still there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deleter, "delete", _crash)
        with pytest.raises(_KilledError):
            archived.clean()
    (waiting,) = (archived.archive / "_outbox" / "cleaning").glob("*/*.parquet")
    others = waiting.parent.with_name("123-4") / waiting.name
    others.parent.mkdir()
    waiting.rename(others)
    assert archived.clean().deleted == 10
    assert others.exists()
    assert len(archived.archived("id")) == 10
