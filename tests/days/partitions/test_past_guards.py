"""A row that was written past the guards into a closed day: nothing says that it is published."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.partitions import calendar, close
from outbox_pipelines.errors import NotReadyError
from tests.days.partitions import days
from tests.days.partitions.days import DAY
from tests.schema.servers import Connection, Database

LEAF = calendar.leaf_of(DAY)
_STATES = "SELECT status, processed_at IS NULL FROM outbox_events WHERE event_type = 'late'"
LATE = ("PENDING", True)
REFUSED = rf"{DAY} has 1 unpublished row that bypassed the guards "


def _past_guards(database: Database, late: Connection | None = None) -> None:
    database.rows(f"ALTER TABLE {LEAF} DISABLE TRIGGER outbox_closed")
    with late or database.connect(autocommit=False) as connection:
        connection.execute("SET LOCAL outbox.backfill = on")
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
            "VALUES ('order', '1', 'late', '{}', %s::date + time '12:00')",
            [DAY],
        )
    database.rows(f"ALTER TABLE {LEAF} ENABLE ALWAYS TRIGGER outbox_closed")
    # The relay's position moves past it, and no relay reads the day.
    days.relayed(database)
    database.rows(
        "INSERT INTO outbox_progress (shard, shards, done, target, last_seq, events) "
        "SELECT shard, shards, done, target, last_seq, 1 FROM outbox_shards"
    )


def _states(database: Database) -> list[tuple[object, ...]]:
    return database.rows(_STATES)


def test_it_is_not_shown_as_published(database: Database, tmp_path: Path) -> None:
    """Guards against PROCESSED of an event that was not published, and never will be."""
    days.closed(database)
    _past_guards(database)
    assert _states(database) == [LATE]
    assert database.value("SELECT count(*) FROM outbox_events WHERE status = 'PROCESSED'") == 20
    archiving = days.archiving(database, tmp_path)
    for again in (False, True):
        with pytest.raises(NotReadyError, match=f"{REFUSED}.*partitions reopen {DAY}"):
            archive.archive(archiving, DAY, again=again)
    # Without an archive neither: what is dropped is published.
    with pytest.raises(NotReadyError, match=REFUSED):
        drop.drop(database.settings.model_copy(update={"archive": "none"}), DAY)
    assert database.value("SELECT count(*) FROM outbox") == 21


def test_reopening_has_it_published(database: Database, tmp_path: Path) -> None:
    """Guards against a command that opens the day, and leaves the event behind the position."""
    days.closed(database)
    _past_guards(database)
    close.reopen(database.settings, DAY)
    unpublished = (
        "SELECT event_type FROM outbox o, outbox_shards s "
        "WHERE NOT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)"
    )
    assert database.rows(unpublished) == [("late",)]
    assert _states(database) == [LATE]
    (closing,) = close.close(database.settings, DAY)
    assert "has not published 1" in closing.why_not
    days.relayed(database)
    assert [status for status, _ in _states(database)] == ["PROCESSED"]
    assert close.close(database.settings, DAY)[0].closed
    assert [status for status, _ in _states(database)] == ["PROCESSED"]
    archiving = days.archiving(database, tmp_path)
    assert archive.archive(archiving, DAY).manifest.rows == 21
    assert drop.drop(archiving, DAY).rows == 21


def test_of_a_transaction_that_runs_since_before(database: Database) -> None:
    """Guards against a look only at ids behind the moment of closing: an older one was not over then; and
    against what was published being published again with it."""
    late = database.connect(autocommit=False)
    late.execute("SELECT pg_current_xact_id()")
    days.fill(database)
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed
    _past_guards(database, late)
    with database.connect() as connection, pytest.raises(NotReadyError, match=REFUSED):
        close.require_published(connection, DAY)
    close.reopen(database.settings, DAY)
    assert "has not published 1" in close.close(database.settings, DAY)[0].why_not


def test_of_a_day_that_closed_after_another(database: Database) -> None:
    """Guards against rows judged by the snapshot of another day: they would count as late, and come again."""
    before = DAY - timedelta(1)
    days.closed(database, before)
    days.closed(database)
    with database.connect() as connection:
        close.require_published(connection, DAY)
    close.reopen(database.settings, DAY)
    assert close.close(database.settings, DAY)[0].closed


def test_of_an_archived_day(database: Database, tmp_path: Path) -> None:
    """Guards against a file that says PROCESSED of it."""
    days.closed(database)
    archiving = days.archiving(database, tmp_path)
    archive.archive(archiving, DAY)
    _past_guards(database)
    assert _states(database) == [LATE]
    assert any("missing in the file" in each for each in archive.verify(archiving, DAY).differences)
    with pytest.raises(NotReadyError, match=rf"{REFUSED}.*as new events, and delete them from {LEAF}"):
        archive.archive(archiving, DAY, again=True)
    with pytest.raises(drop.NotProvenError, match="missing in the file"):
        drop.drop(archiving, DAY)
    database.rows(f"ALTER TABLE {LEAF} DISABLE TRIGGER outbox_append_only")
    database.rows(f"DELETE FROM {LEAF} WHERE event_type = 'late'")
    database.rows(f"ALTER TABLE {LEAF} ENABLE TRIGGER outbox_append_only")
    assert drop.drop(archiving, DAY).rows == 20


def test_what_was_written_before_the_day_closed_is_published(database: Database) -> None:
    """Guards against a row of a sealed day, which relays still read, taken for one that came too late."""
    days.fill(database)
    (closing,) = close.close(database.settings, DAY)
    assert "has not published" in closing.why_not
    _past_guards(database)
    assert close.close(database.settings, DAY)[0].closed
    assert [status for status, _ in _states(database)] == ["PROCESSED"]
    with database.connect() as connection:
        close.require_published(connection, DAY)
