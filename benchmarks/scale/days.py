"""Attached days, ten times as many each: drain, latency, and what the query of a tick plans and reads."""

from __future__ import annotations

import re
import time
from statistics import median
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from benchmarks import latency, programs
from benchmarks.past import ago, count_as_closed, publish
from benchmarks.scale.filling import fill
from benchmarks.scale.growth import FLAT, Figure, milliseconds, number, p99, rate, table
from benchmarks.scale.sizes import Sizes
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.days.partitions import ahead
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.settings import Settings

_TICK: Final = 400
_PLANS: Final = 9
_MOST: Final = 8_000_000
_FIGURES: Final = (
    Figure("drain", rate, FLAT),
    Figure("insert → consumer at 1,000/s, p50", milliseconds, FLAT),
    Figure("insert → consumer at 1,000/s, p99", milliseconds),
    Figure(f"tick of {_TICK}, planned each time: planning", milliseconds, FLAT),
    Figure(f"tick of {_TICK}, kept plan: execution", milliseconds, FLAT),
    Figure(f"tick of {_TICK}, kept plan: buffers", number, FLAT),
    Figure("empty tick, kept plan: execution", milliseconds, FLAT),
)


def measure(servers: Settings, sizes: Sizes) -> list[Row]:
    """Rows of the table."""
    closed = {f"{days:,} closed": _at(servers, sizes, days, is_closed=True) for days in sizes.days}
    # As an outbox has them whose days are never closed.
    still_open = {f"{days:,} open": _at(servers, sizes, days, is_closed=False) for days in sizes.days[1:]}
    what = "{} days attached, and 14 ahead"
    return [*table(what, _FIGURES, closed), *table(what, _FIGURES, still_open)]


def _at(servers: Settings, sizes: Sizes, days: int, *, is_closed: bool) -> dict[str, float]:
    with fresh_outbox(servers, **SHORT_LOG) as settings:
        ahead.ensure(settings, settings.partitions_ahead, ago(days))
        publish(settings)
        if is_closed:
            count_as_closed(settings)
        planning, execution, buffers, empty = _plans(settings)
        fill(settings, sizes.others)
        drained = programs.drain_rate(settings)
        with (
            latency.running(settings, "relay"),
            programs.running(settings, "benchmarks.load", settings.dsn, 2, 1000),
        ):
            found = latency.listen(settings, seconds=sizes.listening)
    values = (drained, median(found), p99(found), planning, execution, buffers, empty)
    return dict(zip((figure.name for figure in _FIGURES), values, strict=True))


def _plans(settings: Settings) -> tuple[float, float, float, float]:
    """Return planning and execution time of a tick in seconds, its buffers, and the time of an empty one."""
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(relay_sql.PLAN_EACH)
        connection.execute(relay_sql.BY_INDEX)
        before = _snapshot(connection)
        with psycopg.connect(settings.dsn) as writer:
            writer.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "SELECT 'order', i::text, 'order.placed', '{}' FROM generate_series(1, %s) i",
                [_TICK],
            )
        after = _snapshot(connection)
        ((open_from,),) = connection.execute(relay_sql.OPEN_FROM)
        tick = {
            **{"first": str(before.xmax), "end": str(after.xmax), "target": str(after), "last_seq": 0},
            **{"late": "{}", "limit": 500, "most": _MOST, "open_from": open_from, **relay_sql.lanes_of(0, 1)},
        }
        explain: LiteralString = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) "
        query: LiteralString = explain + relay_sql.EVENTS.small_tick
        planning = median(_explained(connection, query, tick)["Planning Time"] for _ in range(_PLANS))
        connection.execute(relay_sql.PLAN_ONCE)
        kept, names = _prepared(relay_sql.EVENTS.small_tick, open_from)
        connection.execute(f"PREPARE tick AS {kept}".encode())
        full = _execute(connection, names, tick)
        empty = _execute(connection, names, tick | {"first": str(after.xmax)})
    return (
        planning / 1000,
        median(one["Execution Time"] for one in full) / 1000,
        median(one["Plan"]["Shared Hit Blocks"] + one["Plan"]["Shared Read Blocks"] for one in full),
        median(one["Execution Time"] for one in empty) / 1000,
    )


def _execute(
    connection: psycopg.Connection[Any], names: list[str], tick: dict[str, Any]
) -> list[dict[str, Any]]:
    values = sql.SQL(", ").join(sql.Literal(str(tick[name])) for name in names)
    query = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE tick ({})").format(values)
    return [_explained(connection, query, None) for _ in range(_PLANS)]


def _prepared(query: str, open_from: str) -> tuple[str, list[str]]:
    """Return the query as the relay prepares it, and the names of its parameters in order."""
    text = query.replace("%(open_from)s", f"'{open_from}'")
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", text)))
    for number_, name in enumerate(names, 1):
        text = text.replace(f"%({name})s", f"${number_}")
    return text.replace("%%", "%"), names


def _explained(connection: psycopg.Connection[Any], query: Any, values: Any) -> dict[str, Any]:
    (((found,),),) = connection.execute(query, values).fetchall()
    time.sleep(0.01)
    assert isinstance(found, dict)
    return found


def _snapshot(connection: psycopg.Connection[Any]) -> Snapshot:
    ((text,),) = connection.execute(relay_sql.SNAPSHOT)
    return Snapshot.parse(text)
