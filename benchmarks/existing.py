"""Tables that exist already: with an integer, with times alone, and shared by relays that keep no order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Final

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Ratio, Row, rate
from outbox_pipelines.settings import Settings

_EVENTS: Final = sized(200_000, 20_000)
_ROUNDS: Final = sized(3, 1)
_SHARED: Final = (1, 2, 4)
_TABLE: Final = """
CREATE TABLE existing (
    seq bigint GENERATED ALWAYS AS IDENTITY, id {id}, aggregate_type text NOT NULL,
    aggregate_id text NOT NULL, event_type text NOT NULL, payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(), published_at timestamptz,
    retry_count int NOT NULL DEFAULT 0);
CREATE INDEX ON existing ({order}) WHERE published_at IS NULL;
INSERT INTO existing (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', (i % 20000)::text, 'order.placed',
       jsonb_build_object('number', i, 'customer', md5(i::text), 'state', 'placed',
                          'note', md5((i * 7)::text) || md5((i * 11)::text), 'total', i % 1000)
FROM generate_series(1, {events}) i"""
_UUID: Final = "uuid PRIMARY KEY DEFAULT gen_random_uuid()"
_SERIAL: Final = "bigserial PRIMARY KEY"
_AGAIN: Final = "UPDATE existing SET published_at = NULL"
# From the first row that was marked to the last: the start of the processes does not count.
_RATE: Final = """
SELECT count(published_at) / extract(epoch FROM max(published_at) - min(published_at))::float8
FROM existing"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as tables:
        seq = tables.enter_context(_table(servers, _UUID, "seq"))
        serial = tables.enter_context(_table(servers, _SERIAL, "created_at"))
        uuid = tables.enter_context(_table(servers, _UUID, "created_at"))
        shared = tables.enter_context(_table(servers, _UUID, "created_at", order="none"))
        for _ in range(_ROUNDS):
            for name, settings in (("seq", seq), ("serial", serial), ("uuid", uuid)):
                rates.setdefault(name, []).append(_drain(settings, 1))
            for relays in _SHARED:
                rates.setdefault(f"shared by {relays}", []).append(_drain(shared, relays))
    base = median(rates["seq"])
    told = {
        "seq": f"existing table of {_EVENTS:,}: with an integer",
        "serial": "existing table ordered by times, ids from a sequence",
        "uuid": "existing table ordered by times, random ids",
        **{f"shared by {n}": f'existing table, order = "none", {n} relay{"s" * (n > 1)}' for n in _SHARED},
    }
    return [
        Row(told[name], (rate(found),), (Ratio(median(found) / base, "with an integer"),))
        for name, found in rates.items()
    ]


@contextmanager
def _table(
    servers: Settings, kind: str, order_column: str, *, order: str | None = None
) -> Iterator[Settings]:
    with fresh_outbox(servers) as settings:
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            connection.execute(_TABLE.format(id=kind, order=order_column, events=_EVENTS).encode())
        columns = {"published_at": "published_at", "retry_count": "retry_count"}
        table = {"name": "existing", "order": order or order_column, "columns": columns}
        yield settings.model_copy(update={"table": table})


def _drain(settings: Settings, relays: int) -> float:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(_AGAIN)
        # Rewritten, as a table is whose rows were never touched.
        connection.execute("VACUUM (FULL, ANALYZE) existing")
        connection.execute("CHECKPOINT")
        with ExitStack() as started:
            processes = [
                started.enter_context(
                    programs.running(settings, "outbox_pipelines", "relay", "--until-empty")
                )
                for _ in range(relays)
            ]
            for process in processes:
                assert process.wait(300) == 0
        row = connection.execute(_RATE).fetchone()
    assert row is not None
    return float(row[0])
