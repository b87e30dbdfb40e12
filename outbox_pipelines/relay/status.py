"""What an operator asks first: backlog, lag, who holds each shard, what is parked, days ahead.

Invariants:
- One read, cheap however large the table: counts are capped, the range comes from the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.partitions import calendar
from outbox_pipelines.relay import queries
from outbox_pipelines.settings import Settings

BACKLOG_CAP = 100_000
# Fewer days ahead than this want attention: without a partition, business transactions fail.


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard: who relays it, and how it is doing."""

    shard: int
    shards: int
    """How many there are."""
    owner: str | None
    """The holder; None while nobody holds the shard."""
    held_seconds: float | None
    heartbeat_seconds: float | None
    """Age of the last sign of life, whoever gave it."""
    successor_waits: bool
    breaker: str
    """What the holder sees of Kafka: closed (all is well), open, half-open."""
    breaker_reason: str | None
    wanted: int | None
    """How many shards there are to be, while that is being changed."""
    backlog: int
    """Committed events that are not published, counted up to `BACKLOG_CAP`."""
    oldest_seconds: float
    """Age of the oldest of them; 0 without a backlog."""
    events_per_second: float
    """Published over the last minute."""
    lag_seconds: float | None
    """From commit to settled, of the newest event published; None before the first."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one outbox."""

    shards: list[ShardStatus]
    parked: int
    parked_reasons: dict[str, int]
    """Why, of the first event of each blocked aggregate: the three most frequent, with their counts."""
    dead_letters: int
    days_ahead: int
    """Whole days from tomorrow that have a partition."""
    days_late: calendar.Late
    """Days for which something should have happened."""


def read(settings: Settings) -> Status:
    """Reads it.

    Raises:
        SetupError: the database is away, or has no outbox.
    """
    with connect(settings, name="outbox: status") as connection:
        connection.execute(queries.TUNE)
        try:
            return Status(
                shards=_shards(connection, settings),
                parked=_number(connection, queries.PARKED),
                parked_reasons=dict(connection.execute(queries.PARKED_REASONS).fetchall()),
                dead_letters=_number(connection, queries.DEAD_LETTERS),
                days_ahead=calendar.ahead(connection),
                days_late=calendar.late(connection, settings),
            )
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
            raise SetupError(
                f"no outbox in schema {settings.db_schema!r} (OUTBOX_SCHEMA): run `outbox migrate`"
            ) from None


def render(status: Status) -> str:
    """For a terminal."""
    lines = []
    for shard in status.shards:
        backlog = f"{shard.backlog:,}" if shard.backlog < BACKLOG_CAP else f"at least {BACKLOG_CAP:,}"
        lines += [
            f"shard {shard.shard}",
            f"  holder      {holder(shard)}",
            f"  kafka       {_kafka(shard)}",
            f"  backlog     {backlog} events"
            + (f", the oldest {age(shard.oldest_seconds)} old" if shard.backlog else ""),
            f"  rate        {shard.events_per_second:,.0f} events/s over the last minute",
            f"  lag         {'-' if shard.lag_seconds is None else f'{shard.lag_seconds * 1000:,.0f} ms'}",
        ]
    few = "" if status.days_ahead >= calendar.FEW_AHEAD else "  (few: run `outbox partitions ensure`)"
    lines += [
        f"parked        {status.parked:,}",
        *(f"  {count:,} × {reason}" for reason, count in status.parked_reasons.items()),
        f"dead letters  {status.dead_letters:,}"
        + ("  (see `outbox dead-letters list`)" if status.dead_letters else ""),
        f"days ahead    {status.days_ahead}{few}",
        *_late(status.days_late),
    ]
    return "\n".join(lines)


def _late(days: calendar.Late) -> list[str]:
    waiting = {
        "to be closed": (days.to_close, "outbox partitions close"),
        "to be archived": (days.to_archive, "outbox archive day DAY"),
        "to be dropped": (days.to_drop, "outbox partitions drop --due"),
    }
    return [
        f"days late     {count} {what} (see `outbox partitions list`, and run `{command}`)"
        for what, (count, command) in waiting.items()
        if count
    ]


def _shards(connection: Connection, settings: Settings) -> list[ShardStatus]:
    lock = f"{settings.db_schema}.outbox_shards"
    rows = connection.execute(queries.SHARDS, {"lock": lock, "waiting": f"{lock}.next"}).fetchall()
    row = connection.execute(queries.OPEN_FROM).fetchone()
    assert row is not None
    open_from = row[0]
    shards = []
    for (
        shard,
        of,
        owner,
        held_seconds,
        heartbeat_seconds,
        successor_waits,
        breaker,
        breaker_reason,
        wanted,
    ) in rows:
        backlog, oldest_seconds = _backlog(connection, shard, of, open_from)
        events_per_second, lag_seconds = _rate(connection, shard)
        shards.append(
            ShardStatus(
                shard=shard,
                shards=of,
                wanted=wanted,
                owner=owner,
                held_seconds=held_seconds,
                heartbeat_seconds=heartbeat_seconds,
                successor_waits=successor_waits,
                breaker=breaker,
                breaker_reason=breaker_reason,
                backlog=backlog,
                oldest_seconds=oldest_seconds,
                events_per_second=events_per_second,
                lag_seconds=lag_seconds,
            )
        )
    return shards


def _backlog(connection: Connection, shard: int, shards: int, open_from: str) -> tuple[int, float]:
    given = {"shard": shard, "shards": shards, "cap": BACKLOG_CAP, "open_from": open_from}
    row = connection.execute(queries.BACKLOG, given).fetchone()
    assert row is not None
    return row[0], row[1] or 0.0


def _rate(connection: Connection, shard: int) -> tuple[float, float | None]:
    row = connection.execute(queries.RATE, {"shard": shard}).fetchone()
    assert row is not None
    return row[0], row[1]


def _number(connection: Connection, query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def holder(shard: ShardStatus) -> str:
    """Who relays a shard since when, for people."""
    if shard.owner is None:
        seen = shard.heartbeat_seconds
        return "nobody: start `outbox relay`" + ("" if seen is None else f"; last seen {age(seen)} ago")
    successor = ", a successor waits" if shard.successor_waits else ""
    return f"{shard.owner} for {age(shard.held_seconds or 0)}{successor}"


def _kafka(shard: ShardStatus) -> str:
    if shard.breaker == "closed":
        return "-" if shard.owner is None else "takes events"
    return f"AWAY, breaker {shard.breaker}: {shard.breaker_reason}; events wait, nothing is to be done here"


def age(seconds: float) -> str:
    """For people."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
