"""What an event costs the business transaction that writes it: interleaved, medians.

Invariants:
- Two figures that are compared come from turns of one loop, so that a drift falls on both alike.
- A bare INSERT serialises its payload and casts it, as any application must; it does not ask for id and seq.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from typing import Any

import asyncpg
import psycopg
import sqlalchemy
from sqlalchemy import orm

from benchmarks import beside_relay
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Ratio, Row, microseconds
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import NewEvent, emit, emit_many

_ROUNDS = sized(1500, 300)
_BATCHES = sized(60, 15)
_BARE = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ({}, {}, {}, {})"
_BARE_PSYCOPG = _BARE.format("%s", "%s", "%s", "%s::jsonb").encode()
_BARE_ASYNCPG = _BARE.format("$1", "$2", "$3", "$4")
_RETURNING_PSYCOPG = _BARE_PSYCOPG + b" RETURNING id, seq"
_BARE_HUNDRED = _BARE_PSYCOPG + b", (%s, %s, %s, %s::jsonb)" * 99
_BARE_SQLALCHEMY = sqlalchemy.text(_BARE.format(":type", ":id", ":event", "CAST(:payload AS jsonb)"))
_PAYLOAD = {"total": 5, "state": "placed"}

Way = Callable[[int], object]


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as settings, psycopg.connect(settings.dsn) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, n int NOT NULL)")
        connection.execute("INSERT INTO orders SELECT i, 0 FROM generate_series(0, 999) i")
        connection.commit()
        return [
            *_transactions(connection),
            *_psycopg(connection),
            *_sqlalchemy(settings.dsn),
            *asyncio.run(_asyncpg(settings.dsn)),
            *_hundreds(connection),
            *beside_relay.rows(servers),
        ]


def _transactions(connection: psycopg.Connection[Any]) -> list[Row]:
    def business(n: int) -> None:
        connection.execute("UPDATE orders SET n = n + 1 WHERE id = %s", [n % 1000])

    def with_bare(n: int) -> None:
        business(n)
        connection.execute(_BARE_PSYCOPG, _bare(n))

    def with_emit(n: int) -> None:
        business(n)
        emit(connection, *_event(n))

    ways: dict[str, Way] = {"without": business, "bare": with_bare, "emit": with_emit}
    whole = interleaved(ways, connection.commit, timed_commit=True)
    return [
        Row("transaction without an event", (microseconds(whole["without"]),)),
        Row(
            "transaction with a bare INSERT of an event",
            (microseconds(whole["bare"]),),
            (Ratio(whole["bare"] / whole["without"], "without"),),
        ),
        Row(
            "transaction with emit",
            (
                microseconds(whole["emit"]),
                microseconds(whole["emit"] - whole["without"], "of which the event"),
            ),
            (Ratio(whole["emit"] / whole["bare"], "a bare INSERT"),),
        ),
    ]


def _psycopg(connection: psycopg.Connection[Any]) -> list[Row]:
    ways: dict[str, Way] = {
        "bare": lambda n: connection.execute(_BARE_PSYCOPG, _bare(n)),
        "returning": lambda n: connection.execute(_RETURNING_PSYCOPG, _bare(n)).fetchone(),
        "emit": lambda n: emit(connection, *_event(n)),
        "key": lambda n: emit(connection, *_event(n), idempotency_key=f"key {n}"),
    }
    medians = interleaved(ways, connection.commit)
    return [
        Row(
            "bare INSERT with RETURNING id, seq through psycopg, no commit",
            (microseconds(medians["returning"]),),
            (Ratio(medians["returning"] / medians["bare"], "without RETURNING"),),
        ),
        *_alone("psycopg", medians),
    ]


def _sqlalchemy(dsn: str) -> list[Row]:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with orm.Session(engine) as session:
        ways: dict[str, Way] = {
            "bare": lambda n: session.execute(
                _BARE_SQLALCHEMY, dict(zip(("type", "id", "event", "payload"), _bare(n), strict=True))
            ),
            "emit": lambda n: emit(session, *_event(n)),
            "key": lambda n: emit(session, *_event(n), idempotency_key=f"session {n}"),
        }
        rows = _alone("SQLAlchemy's session", interleaved(ways, session.commit))
    engine.dispose()
    return rows


async def _asyncpg(dsn: str) -> list[Row]:
    at = psycopg.conninfo.conninfo_to_dict(dsn)
    connection = await asyncpg.connect(
        host=at["host"],
        port=at["port"],
        user=at["user"],
        database=at["dbname"],
        passfile=at.get("passfile"),
    )
    ways: dict[str, Callable[[int], Awaitable[object]]] = {
        "bare": lambda n: connection.execute(_BARE_ASYNCPG, *_bare(n)),
        "emit": lambda n: emit(connection, *_event(n)),
        "key": lambda n: emit(connection, *_event(n), idempotency_key=f"asyncpg {n}"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(_ROUNDS):
        for name, way in ways.items():
            async with connection.transaction():
                # The first statement of a transaction takes its id.
                await connection.execute("SELECT pg_current_xact_id()")
                started = time.perf_counter()
                await way(n)
                times[name].append(time.perf_counter() - started)
    await connection.close()
    return _alone("asyncpg", _medians(times))


def _alone(driver: str, medians: Mapping[str, float]) -> list[Row]:
    return [
        Row(
            f"emit through {driver}, no commit",
            (microseconds(medians["emit"]),),
            (Ratio(medians["emit"] / medians["bare"], "a bare INSERT"),),
            "1.0",
        ),
        Row(
            f"emit through {driver} with an idempotency key, no commit",
            (microseconds(medians["key"]),),
            (Ratio(medians["key"] / medians["bare"], "a bare INSERT"),),
        ),
    ]


def _hundreds(connection: psycopg.Connection[Any]) -> list[Row]:
    rows = []
    for what, key, goal in (("", None, "12"), (", each with a key", "hundred", "6")):

        def events(n: int, key: str | None = key) -> list[NewEvent]:
            return [
                NewEvent(*_event(m), idempotency_key=key and f"{key} {n} {m}")
                for m in range(100 * n, 100 * n + 100)
            ]

        def calls(n: int, events: Callable[[int], list[NewEvent]] = events) -> None:
            # Keys of their own, or they would be duplicates of the list's.
            for event in events(-n - 1):
                emit(connection, *event[:4], idempotency_key=event.idempotency_key)

        def call(n: int, events: Callable[[int], list[NewEvent]] = events) -> None:
            emit_many(connection, events(n))

        def bare(n: int) -> None:
            values = [value for m in range(100 * n, 100 * n + 100) for value in _bare(m)]
            connection.execute(_BARE_HUNDRED, values)

        ways: dict[str, Way] = {"calls": calls, "call": call}
        if key is None:
            ways["bare"] = bare
        times = interleaved(ways, connection.commit, rounds=_BATCHES)
        fast = {way: (Ratio(times["calls"] / times[way], "as fast as 100 calls"),) for way in times}
        rows.append(Row(f"100 events in one call{what}", (microseconds(times["call"]),), fast["call"], goal))
        if key is None:
            rows.append(Row("100 rows in one bare INSERT", (microseconds(times["bare"]),), fast["bare"]))
    return rows


def _event(n: int) -> tuple[str, int, str, object]:
    return "order", n % 1000, "order.placed", _PAYLOAD


def _bare(n: int) -> tuple[str, str, str, str]:
    return "order", str(n % 1000), "order.placed", json.dumps(_PAYLOAD)


def interleaved(
    ways: Mapping[str, Way],
    commit: Callable[[], object],
    *,
    rounds: int = _ROUNDS,
    timed_commit: bool = False,
) -> dict[str, float]:
    """Median seconds of each way, each in a transaction of its own."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way(n)
            if timed_commit:
                commit()
            times[name].append(time.perf_counter() - started)
            commit()
    return _medians(times)


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    # The first ones prepare statements.
    return {name: median(values[len(values) // 15 :]) for name, values in times.items()}
