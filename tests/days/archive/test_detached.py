"""A day whose partition is detached, or half detached: its events are read, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.archive.history import history
from outbox_pipelines.days.partitions import calendar, close
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import day_events
from outbox_pipelines.reconciliation.exchange import local
from outbox_pipelines.reconciliation.workspace import workspace
from outbox_pipelines.settings import Settings
from tests.days.archive.days import days_ago, make_days, past_day, publish, write
from tests.schema.servers import Database


@contextmanager
def detached(database: Database, day: date, place: str) -> Iterator[None]:
    """A drop has detached the day, or a report keeps it from being detached wholly."""
    statement = f"ALTER TABLE outbox DETACH PARTITION {calendar.leaf_of(day)} CONCURRENTLY".encode()
    with database.connect(autocommit=False) as reader, database.connect() as owner:
        if place == "detaching":
            reader.execute("SELECT count(*) FROM outbox")
            owner.execute("SET lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                owner.execute(statement)
        else:
            owner.execute(statement)
        yield
        reader.rollback()


def reconciled(settings: Settings, day: date) -> tuple[str, int]:
    """Where reconciliation finds the events of a day, and how many."""
    with local() as exchange, workspace() as space:
        found = day_events.read(settings, day, "day", 1, exchange, space, lambda _: None)
    return "archive" if found.is_archived else "table", found.count


@pytest.mark.extended
@pytest.mark.parametrize("place", ["detaching", "detached"])
def test_nothing_of_an_archived_day_is_left_out(database: Database, settings: Settings, place: str) -> None:
    """Guards against a history, a list and a reconciliation from which a day is missing without a word."""
    day = past_day(database)
    days.archive(settings, day)
    whole = [event.seq for event in history(settings, "order", "42")]
    assert whole
    counted = reconciled(settings, day)
    with detached(database, day, place):
        assert [event.seq for event in history(settings, "order", "42")] == whole
        with pytest.raises(SetupError, match=f"{day} is not in the table, only in the archive"):
            history(database.settings, "order", "42")
        assert reconciled(settings, day) == counted
        (listed,) = [each for each in calendar.read(settings) if each.day == day]
        assert listed.partition == place
        # An operator may not read the partition alone.
        role = database.role()
        database.rows(f"SELECT outbox_grant_operator('{role}')")
        operator = settings.model_copy(update={"dsn": f"{settings.require_dsn()} user={role}"})
        assert reconciled(operator, day) == ("archive", counted[1])


def test_a_file_that_has_changed_is_refused(database: Database, settings: Settings) -> None:
    """Guards against "all present" by a file that has lost events, and against stack traces."""
    day = past_day(database)
    archived = days.archive(settings, day)
    file = Path(archived.address)
    content = file.read_bytes()
    database.rows(f"DROP TABLE {calendar.leaf_of(day)}")
    database.rows("UPDATE outbox_days SET state = 'dropped' WHERE day = %s", day)
    remedy = f"run `outbox archive verify {day}`"
    table = pq.read_table(file)
    file.chmod(0o600)

    def write(changed: pa.Table) -> None:
        pq.write_table(changed, file)

    def flip() -> None:
        file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])

    flip()
    with pytest.raises(SetupError, match=remedy):
        reconciled(settings, day)
    damages: list[Callable[[], object]] = [
        lambda: write(table.slice(1)),
        lambda: write(table.drop_columns(["seq"])),
        lambda: file.write_bytes(content[:-100]),
        # As large as before: only the reader finds it.
        lambda: file.write_bytes(bytes(len(content))),
        file.unlink,
    ]
    for damage in damages:
        damage()
        with pytest.raises(SetupError, match=remedy):
            reconciled(settings, day)
        with pytest.raises(SetupError, match=remedy):
            history(settings, "order", "42")
        # For events of a day beside it.
        with pytest.raises(SetupError, match=remedy):
            list(day_events.archived_ids(settings, day))
    file.write_bytes(content)
    assert reconciled(settings, day)[0] == "archive"


def test_a_day_that_is_nowhere_is_named(database: Database, settings: Settings) -> None:
    """Guards against a part of a history that is taken for all: the day is not archived."""
    day = past_day(database)
    close.close(settings, day)
    with detached(database, day, "detached"):
        for each in (settings, database.settings):
            with pytest.raises(SetupError, match=f"run `outbox partitions attach {day}`"):
                history(each, "order", "42")


@pytest.mark.extended
@pytest.mark.parametrize("named", [True, False])
def test_backfilled_events_are_no_phantoms(database: Database, settings: Settings, named: bool) -> None:
    """Guards against false alarms for events whose ids were drawn long after their day: a backfill."""
    old, written = days_ago(9), days_ago(0)
    make_days(database, old)
    found = write(database, old, [{}] * 12)
    publish(database)
    days.archive(settings, old)
    drop.drop(settings, old)
    own = settings if named else settings.model_copy(update={"archive": "none"})
    assert reconciled(own, written)[0] == "table"
    with workspace() as space:
        for event in found:
            space.run(f"INSERT INTO unknown (side, id) VALUES ('topics', '{event.id}')")
        stranger = "INSERT INTO unknown (side, id) VALUES ('topics', '{}')"
        space.run(stranger.format(str(found[0].id)[:-4] + "ffff"))
        notes = day_events.forget(own, written, "topics", space)
        ((left,),) = space.rows("SELECT count(*) FROM unknown")
    assert left == (1 if named else 13)
    assert any("backfilled there counts as phantom" in note for note in notes) != named
