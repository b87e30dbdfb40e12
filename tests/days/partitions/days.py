"""Days of the past with events, for tests of what becomes of them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from outbox_pipelines.days.partitions import ahead, close
from outbox_pipelines.settings import Settings
from tests.schema.servers import Connection, Database

TODAY = datetime.now(UTC).date()
DAY = TODAY - timedelta(3)

_FILL = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
SELECT 'order', (i %% 7)::text, 'order.placed', jsonb_build_object('n', i),
       %s::date::timestamp AT TIME ZONE 'UTC' + make_interval(secs => i)
FROM generate_series(1, %s) i"""


def write(connection: Connection, day: date = DAY, events: int = 20) -> None:
    """Write events of a past day, as the owner, in the current transaction."""
    connection.execute("SET LOCAL outbox.backfill = on")
    connection.execute(_FILL, [day, events])


def fill(database: Database, day: date = DAY, events: int = 20) -> None:
    """A partition for that day, and events in it."""
    ahead.ensure(database.settings, since=day)
    with database.connect(autocommit=False) as connection:
        write(connection, day, events)


def write_elsewhere(database: Database) -> None:
    """Let another transaction draw an id and commit, without an event."""
    database.rows("SELECT pg_current_xact_id()")


def relayed(database: Database) -> None:
    """As if a relay had published all that has committed."""
    database.rows("UPDATE outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL")


def closed(database: Database, day: date = DAY, events: int = 20) -> None:
    """A day that is over, published and closed."""
    fill(database, day, events)
    relayed(database)
    (closing,) = close.close(database.settings, day)
    assert closing.closed, closing.why_not


def archiving(database: Database, directory: Path) -> Settings:
    """Settings with an archive."""
    return database.settings.model_copy(update={"archive": str(directory)})


def state(database: Database, day: date = DAY) -> str:
    value: str = database.value("SELECT state FROM outbox_days WHERE day = %s", day)
    return value
