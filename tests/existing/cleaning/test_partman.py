"""Months that the real pg_partman makes, on the machine's own PostgreSQL."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.core.secret import Secret
from outbox_pipelines.existing.cleaning.clean_up import clean
from outbox_pipelines.settings import Settings
from tests.conftest import Lasting
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING
from tests.schema.servers import Database, fresh, running_server

_PARENT = MONTHS.split("CREATE TABLE events_01", 1)[0]
_SETTINGS = """
SELECT partman.create_parent('public.events', 'created_at', 'native', 'monthly', p_premake := 2,
                             p_start_partition := (now() - interval '3 months')::text)"""
_MONTHS = """
SELECT relid::regclass::text FROM pg_partition_tree('events')
WHERE isleaf AND relid::text NOT LIKE '%%default' ORDER BY 1"""


@pytest.fixture
def database(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    server = running_server("machine", lasting, tmp_path_factory)
    with fresh(server) as database:
        if not database.value("SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_partman'"):
            message = "the machine's PostgreSQL has no pg_partman: apt-get install postgresql-…-partman"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
        database.rows("CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman")
        database.rows(_PARENT)
        database.rows(_SETTINGS)
        yield database


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    given = {
        "table": tomllib.loads(MONTHS_MAPPING),
        "clean_after_hours": 1.0,
        "archive": str(tmp_path / "archive"),
    }
    return database.settings.model_copy(update=given)


@pytest.mark.extended
def test_months_of_pg_partman(database: Database, settings: Settings) -> None:
    """Guards against a drop after which its maintenance fails, and against its own retention."""
    before = [name for (name,) in database.rows(_MONTHS)]
    database.rows(
        "INSERT INTO events (created_at, published_at) SELECT now() - n * interval '1 month', "
        "CASE WHEN n <> 2 THEN now() - interval '2 hours' END FROM generate_series(0, 3) n"
    )
    cleaned = clean(settings)
    assert len(cleaned.dropped) == 2
    assert len([note for note in cleaned.notes if "not published" in note]) == 1
    assert any("infinite_time_partitions = true" in note for note in cleaned.notes)
    after = [name for (name,) in database.rows(_MONTHS)]
    assert set(before) - set(after) == {name.removeprefix("public.") for name in cleaned.dropped}
    # The pending event stays, in its month; the others are archived.
    assert database.rows("SELECT published_at FROM events") == [(None,)]
    assert len(cleaned.files) == 3

    database.rows("UPDATE partman.part_config SET infinite_time_partitions = true, premake = 4")
    database.rows("CALL partman.run_maintenance_proc()")
    assert len(database.rows(_MONTHS)) >= len(after) + 2
    assert clean(settings).notes == [note for note in cleaned.notes if "not published" in note]


def test_its_newest_month_stays(database: Database, settings: Settings) -> None:
    """Guards against a drop after which its maintenance fails, for all of its tables."""
    for (name,) in database.rows(_MONTHS)[-3:]:
        # As if it had not run since the end of the last month.
        database.rows(f"DROP TABLE {name}")
    database.rows("UPDATE partman.part_config SET infinite_time_partitions = true")
    ended = database.rows(_MONTHS)
    cleaned = clean(settings)
    assert len(cleaned.dropped) == len(ended) - 1
    assert "no later partition exists" in cleaned.notes[0]
    database.rows("CALL partman.run_maintenance_proc()")
    assert len(database.rows(_MONTHS)) > 2


def test_settings_that_the_role_may_not_read(database: Database, settings: Settings) -> None:
    """Guards against a retention that is not reported."""
    role = database.role()
    database.rows(
        f"GRANT SELECT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}; GRANT {role} TO CURRENT_USER"
    )
    dsn = Secret(f"{settings.dsn.reveal()} options='-c role={role}'")
    notes = clean(settings.model_copy(update={"dsn": dsn})).notes
    assert (
        "this role may not read partman.part_config: make sure that public.events has no retention"
        in notes[0]
    )


def test_its_retention_is_reported(database: Database, settings: Settings) -> None:
    """Guards against months that pg_partman drops with pending events; this is what it does."""
    database.rows("INSERT INTO events (created_at) VALUES (now() - interval '3 months')")
    database.rows(
        "UPDATE partman.part_config SET retention = '1 month', retention_keep_table = false, "
        "infinite_time_partitions = true"
    )
    [note] = [each for each in clean(settings).notes if "retention" in each]
    assert note.startswith("pg_partman drops months of public.events by its retention (1 month), also with")
    assert database.value("SELECT count(*) FROM events") == 1
    database.rows("CALL partman.run_maintenance_proc()")
    assert database.value("SELECT count(*) FROM events") == 0
    database.rows(note.split(": ", 1)[1])
    assert not [each for each in clean(settings).notes if "retention" in each]
