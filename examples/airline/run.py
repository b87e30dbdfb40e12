"""The demo: write flights, relay and consume them concurrently, then verify topics and board by the tables.

Invariants:
- Writing, relaying, consuming, hand-overs and kills happen at once; the verification begins when all have
  ended.
- However it ends, nothing that it started goes on.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

from examples.airline import past, queries, report
from examples.airline.desks import Desks
from examples.airline.flights import operations
from examples.airline.ledger import BOARD, TORN
from examples.airline.place import prepared
from examples.airline.projection import Board, differences
from examples.airline.report import Progress, Relayed, Seconds, say
from examples.airline.sessions import Sessions
from examples.airline.verify import verify
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import stack
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.settings import Settings, load_settings

SCHEMA: Final = "outbox_demo"

_TICK_SECONDS: Final = 0.1
# A relay that publishes nothing for so long, while events wait, will not do so any more.
_STUCK_SECONDS: Final = 60.0


def run(flights: int, seed: int) -> int:
    """Run the demo and return the exit code.

    Raises:
        SetupError: the environment must be corrected first.
    """
    started = time.monotonic()
    given = load_settings()
    say("Starting PostgreSQL and Kafka …" if not (given.dsn and given.kafka) else "Connecting …")
    with (
        stack(given, say) as servers,
        # What Dagster started to copy its logs may write a moment longer.
        tempfile.TemporaryDirectory(prefix="outbox-demo-", ignore_cleanup_errors=True) as home,
        prepared(
            given.model_copy(update={"dsn": servers.dsn, "kafka": servers.kafka}), SCHEMA, keep=True
        ) as settings,
    ):
        say(f"Writing {flights:,} flights with three writers, relaying them with Dagster …")
        board = Board(settings, Path(home))
        desks, relayed, writing, draining = _write_and_relay(settings, Path(home), board, flights, seed)
        say(f"Reading {relayed.events:,} events back …")
        verifying = time.monotonic()
        verdict = verify(settings)
        now = time.monotonic()
        if verdict.operations != desks.events:
            verdict.find(
                TORN, f"{desks.events:,} events were written, the tables tell of {verdict.operations:,}"
            )
        with connect(settings, name="outbox demo: verification") as connection:
            for difference in differences(connection):
                verdict.find(BOARD, difference)
        say("Simulating a few past days …")
        days = past.live(settings)
        seconds = Seconds(writing, draining, now - verifying, time.monotonic() - started)
        say(report.summary(settings, flights, desks, relayed, board, verdict, days, seconds))
    return 1 if verdict.findings else 0


def _write_and_relay(
    settings: Settings, home: Path, board: Board, flights: int, seed: int
) -> tuple[Desks, Relayed, float, float]:
    """Until everything is written, published and on the board; seconds of the first, then of the second."""
    sessions = Sessions(settings, home)
    desks = Desks(settings, operations(flights), seed=seed)
    progress = Progress()
    with connect(settings, name="outbox demo: progress") as connection:
        started = time.monotonic()
        try:
            sessions.tend()
            board.start()
            desks.start()
            while desks.working():
                _look(connection, desks, sessions, board, progress)
            written = time.monotonic()
            before, moved_at = -1, written
            while _backlog(settings):
                events = _look(connection, desks, sessions, board, progress)
                if events != before:
                    before, moved_at = events, time.monotonic()
                elif time.monotonic() - moved_at > _STUCK_SECONDS:
                    raise SetupError(f"the relay has published nothing for {_STUCK_SECONDS:.0f} s")
            published = time.monotonic()
            board.finish(connection)
        finally:
            desks.stop()
            board.stop()
            sessions.stop()
            progress.end()
        return desks, relayed(connection), written - started, published - written


def _look(connection: Connection, desks: Desks, sessions: Sessions, board: Board, progress: Progress) -> int:
    """A moment of supervision; how many events are published by now."""
    time.sleep(_TICK_SECONDS)
    now = relayed(connection)
    sessions.tend(now.events)
    board.tend(connection)
    if progress.due():
        progress.show(report.progress_line(desks, now))
    return now.events


def _backlog(settings: Settings) -> int:
    return sum(shard.backlog for shard in outbox_measurements.read(settings).shards)


def relayed(connection: Connection) -> Relayed:
    """Return the relay's own numbers so far."""
    row = connection.execute(queries.RELAYED).fetchone()
    assert row is not None
    events, sessions, median, worst = row
    return Relayed(events, sessions, None if median is None else (median, worst))
