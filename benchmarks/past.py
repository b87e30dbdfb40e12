"""Days of the past with many events, as if they had been written and published then."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import psycopg
from psycopg import sql

from outbox_pipelines.days.partitions import close
from outbox_pipelines.days.partitions.calendar import bounds_of, leaf_of
from outbox_pipelines.settings import Settings

TODAY = datetime.now(UTC).date()

# Around the guards and before the indexes, which attaching makes: in a fifth of the time.
_MAKE = "CREATE TABLE {leaf} (LIKE outbox INCLUDING ALL EXCLUDING INDEXES)"
_FILL = """
INSERT INTO {leaf} (aggregate_type, aggregate_id, event_type, payload, correlation_id, created_at)
SELECT (ARRAY['customer', 'order', 'parcel'])[1 + i %% 3], (i * 7919 %% 50000)::text,
       (ARRAY['order.placed', 'order.paid', 'order.shipped'])[1 + i %% 3],
       jsonb_build_object('number', i, 'total', i %% 997, 'customer', md5(i::text),
                          'note', repeat(md5((i * 3)::text), 5)),
       'request ' || i / 10, %(start)s::timestamptz + make_interval(secs => 86399.0 * i / %(events)s)
FROM generate_series(1, %(events)s::bigint) i"""
_ATTACH = """
ALTER TABLE outbox ATTACH PARTITION {leaf} FOR VALUES FROM ({start}) TO ({stop});
INSERT INTO outbox_days (day) VALUES ({day})"""


def ago(days: int) -> date:
    """So many days back."""
    return TODAY - timedelta(days)


def fill_day(settings: Settings, day: date, events: int) -> None:
    """A closed day with so many events of about 330 B of payload."""
    make_day(settings, day, events)
    publish(settings)
    (closing,) = close.close(settings, day)
    assert closing.closed, closing.why_not


def make_day(settings: Settings, day: date, events: int) -> None:
    """The same, still open."""
    start, stop = bounds_of(day)
    names = {
        "leaf": sql.Identifier(leaf_of(day)),
        **{"start": sql.Literal(start), "stop": sql.Literal(stop), "day": sql.Literal(day)},
    }
    with psycopg.connect(settings.dsn) as connection:
        connection.execute(sql.SQL(_MAKE).format(**names))
        connection.execute(sql.SQL(_FILL).format(**names), {"start": start, "events": events})
        connection.execute(sql.SQL(_ATTACH).format(**names))
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("VACUUM ANALYZE {leaf}").format(**names))
        connection.execute("CHECKPOINT")


def publish(settings: Settings) -> None:
    """All that is committed counts as published."""
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL"
        )


def count_as_closed(settings: Settings) -> None:
    """All days that are over count as closed: enough for what is planned and read; they are not sealed."""
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox_days SET state = 'closed', sealed_at = now(), closed_at = now() "
            "WHERE day < current_date"
        )
