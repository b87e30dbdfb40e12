"""What a transaction that stays open does to a steady load: the relay, Debezium and textbook publishers.

With LONG_MINUTES=N: for so many minutes each in place of 10.

Invariants:
- Two transactions stay open: one has a transaction id, the other a snapshot. Both hold vacuum back.
- The ways run one after the other: one that falls behind takes no CPU from the others.
- A figure is that of the first minute and of the last one; its ratio says how it has grown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import psycopg

from benchmarks import latency, programs, textbook
from benchmarks.latency import DEBEZIUM
from benchmarks.quick import sized
from benchmarks.scale import late, state, steady
from benchmarks.scale.growth import megabytes, number
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Figure, Ratio, Row, milliseconds, p99, rate
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.read import contents
from outbox_pipelines.settings import Settings

_MINUTES: Final = float(os.environ.get("LONG_MINUTES", sized("10", "0.5")))
_SECONDS: Final = _MINUTES * 60
_PART: Final = min(60.0, _SECONDS / 2)
_RATE: Final = 1000
# Of a JVM, too.
_WARM: Final = sized(30.0, 5.0)
_EVERY: Final = 5.0
_FEW: Final = 500
_DEAD: Final = "SELECT pg_stat_get_dead_tuples('textbook_outbox'::regclass)::float8"


class _Way(NamedTuple):
    """A way of publishing."""

    grows: str
    """What an open transaction lets grow."""
    shown: Callable[[float], Figure]
    grown: Callable[[Settings], float]
    """Returns how much of it there is."""
    table: str = "outbox"
    reading: Callable[[psycopg.Connection[Any]], bytes] | None = None
    """Returns the statement that reads the next events."""


class _Moment(NamedTuple):
    """What is looked at every few seconds."""

    at: float
    grown: float
    planning: float
    """Of the reading statement, as executing, in seconds."""
    executing: float


def _tick(connection: psycopg.Connection[Any]) -> bytes:
    """Return the relay's statement for the few events after its position."""
    connection.execute(relay_sql.BY_INDEX)
    ((done, target),) = connection.execute(
        "SELECT done::text, pg_current_snapshot()::text FROM outbox_shards"
    )
    ((open_from,),) = connection.execute(relay_sql.OPEN_FROM)
    edges = {"first": str(Snapshot.parse(done).xmax), "end": str(Snapshot.parse(target).xmax)}
    limits = {"last_seq": 0, "limit": _FEW, "most": contents.FEW}
    given = {**edges, **limits, "target": target, "open_from": open_from}
    return psycopg.ClientCursor(connection).mogrify(relay_sql.EVENTS.small_tick, given).encode()


def _claim(connection: psycopg.Connection[Any]) -> bytes:
    return textbook.CLAIM.encode()


def _dead(settings: Settings) -> float:
    """Return the dead rows of what the relay changes."""
    return state.stored(settings).dead


_TEXTBOOK: Final = _Way("dead rows", number, partial(state.value, query=_DEAD), "textbook_outbox", _claim)
_WAYS: Final = {
    "relay": _Way("dead rows", number, _dead, reading=_tick),
    DEBEZIUM: _Way("WAL retained", megabytes, partial(state.value, query=late.RETAINED)),
    "textbook publisher, UPDATE": _TEXTBOOK,
    "textbook publisher, DELETE": _TEXTBOOK,
}


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows = [Row("beside an open transaction: the load", (rate(_RATE), Figure(_MINUTES, "min")))]
    lasts: dict[str, float] = {}
    for name, way in _WAYS.items():
        with fresh_outbox(servers, **SHORT_LOG) as settings:
            moments, lags = _at(settings, name, way)
        first, last = _parts(lags)
        lasts[name] = p99(last)
        rows.append(_row(f"{name}: p99", milliseconds, p99(first), p99(last)))
        first, last = _parts([(moment.at, moment.grown) for moment in moments])
        rows.append(_row(f"{name}: {way.grows}", way.shown, max(first), max(last)))
        if way.reading:
            for what, values in (
                ("planning", [(moment.at, moment.planning) for moment in moments]),
                ("executing", [(moment.at, moment.executing) for moment in moments]),
            ):
                first, last = _parts(values)
                what = f"{name}: {what} the statement that reads"
                rows.append(_row(what, milliseconds, median(first), median(last)))
    peers = [Ratio(lasts["relay"] / value, name, "last") for name, value in lasts.items() if name != "relay"]
    return [*rows, Row("beside an open transaction: relay: p99 beside the others", (), tuple(peers))]


def _row(what: str, shown: Callable[[float], Figure], first: float, last: float) -> Row:
    figures = (shown(first)._replace(name="first minute"), shown(last)._replace(name="last"))
    ratios = (Ratio(last / first, "the first"),) if first else ()
    return Row(f"beside an open transaction: {what}", figures, ratios)


def _parts(values: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the values of the first and of the last minute."""
    begun, over = values[0][0], values[-1][0]
    return (
        [value for at, value in values if at <= begun + _PART],
        [value for at, value in values if at >= over - _PART],
    )


def _at(settings: Settings, name: str, way: _Way) -> tuple[list[_Moment], list[tuple[float, float]]]:
    moments: list[_Moment] = []
    end = threading.Event()
    with psycopg.connect(settings.dsn) as with_id, psycopg.connect(settings.dsn) as with_snapshot:
        if way.table != "outbox":
            with psycopg.connect(settings.dsn) as connection:
                connection.execute(textbook.TABLE.encode())
        writing = (settings.dsn, _RATE, _WARM + _SECONDS, way.table)
        with (
            _publishing(settings, name),
            programs.running(settings, "benchmarks.scale.writer", *writing),
        ):
            time.sleep(_WARM)
            with_id.execute("SELECT pg_current_xact_id()")
            with_snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            with_snapshot.execute("SELECT pg_current_snapshot()")
            looking = threading.Thread(target=_look, args=(settings, way, moments, end))
            looking.start()
            lags = steady.arrivals(settings, _SECONDS)
            end.set()
            looking.join()
    return moments, lags


@contextmanager
def _publishing(settings: Settings, name: str) -> Iterator[None]:
    topic = settings.topic.format(aggregate_type="order")
    if name.startswith("textbook"):
        given = (settings.dsn, settings.kafka, topic, name.rpartition(" ")[2].lower())
        with programs.running(settings, "benchmarks.textbook", *given):
            yield
    else:
        with latency.running(settings, name):
            yield


def _look(settings: Settings, way: _Way, moments: list[_Moment], end: threading.Event) -> None:
    while not end.is_set():
        planning, executing = _explained(settings, way)
        moments.append(_Moment(time.monotonic(), way.grown(settings), planning, executing))
        end.wait(_EVERY)


def _explained(settings: Settings, way: _Way) -> tuple[float, float]:
    """Return the seconds in which the reading statement is planned and executed; changes nothing."""
    if way.reading is None:
        return 0.0, 0.0
    with psycopg.connect(settings.dsn) as connection:
        statement = way.reading(connection)
        (((plan,),),) = connection.execute(b"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + statement)
        connection.rollback()
    return plan["Planning Time"] / 1e3, plan["Execution Time"] / 1e3
