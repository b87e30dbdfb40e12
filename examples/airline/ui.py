"""`make ui`: Dagster's pages on a relay at work, with flights coming in until Ctrl-C.

Invariants:
- Everything is new at the start and gone at the end: processes, DAGSTER_HOME, schema, topics.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from examples.airline import past, report
from examples.airline.desks import Desks
from examples.airline.flights import IN_A_YEAR, Operation, operations
from examples.airline.pages import HOST, require_free, serving
from examples.airline.place import prepared
from examples.airline.report import Progress, say
from examples.airline.run import relayed
from examples.airline.sessions import environment, make_home
from outbox_pipelines.database import connect
from outbox_pipelines.local import stack
from outbox_pipelines.settings import Settings, load_settings

SCHEMA: Final = "outbox_ui"

_PER_SECOND: Final = 5.0
# Short, so that who watches sees a hand-over.
_SESSION_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.2
# Of which the days that are over have their events.
_PAST_OPERATIONS: Final = 100


def run(port: int, seed: int) -> int:
    """Show the relay until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        SetupError: the environment must be corrected first, such as a port in use.
    """
    require_free(port)
    given = load_settings()
    say("Starting PostgreSQL and Kafka …" if not (given.dsn and given.kafka) else "Connecting …")
    with (
        stack(given, say) as servers,
        # Dagster may still be writing when it is ended.
        tempfile.TemporaryDirectory(prefix="outbox-ui-", ignore_cleanup_errors=True) as home,
        prepared(
            given.model_copy(update={"dsn": servers.dsn, "kafka": servers.kafka}), SCHEMA, keep=False
        ) as settings,
        connect(settings, name="outbox demo: progress") as connection,
    ):
        make_home(Path(home))
        shown = settings.model_copy(
            update={
                "archive": settings.archive or str(Path(home) / "archive"),
                "catalog_file": settings.catalog_file or Path(__file__).parent / "catalog.yaml",
            }
        )
        flights = operations(IN_A_YEAR)
        _write_past(shown, islice(flights, _PAST_OPERATIONS), seed)
        say("Starting Dagster …")
        desks = Desks(settings, flights, seed=seed, per_second=_PER_SECOND)
        progress = Progress()
        with serving(environment(shown, Path(home), _SESSION_SECONDS), Path(home), port) as pages:
            pages.wait_until_ready()
            say(_welcome(port))
            desks.start()
            try:
                while desks.working():
                    pages.require_alive()
                    if progress.due():
                        progress.show(report.progress_line(desks, relayed(connection)))
                    time.sleep(_TICK_SECONDS)
            finally:
                desks.stop()
                progress.end()
                say("Ending Dagster …")
    return 0


def _write_past(settings: Settings, stream: Iterator[Operation], seed: int) -> None:
    """Days that are over, for what the pages do with days: before Dagster reads which there are."""
    desks = Desks(settings, stream, seed=seed)
    desks.start()
    try:
        while desks.working():
            time.sleep(_TICK_SECONDS)
    finally:
        desks.stop()
    past.write_a_few(settings)


def _welcome(port: int) -> str:
    address = f"http://{HOST}:{port}"
    return f"""
Dagster: {address}
  the outbox and what is made of it   {address}/locations/outbox/asset-groups/outbox/lineage
  what the relay publishes, as plots  {address}/assets/outbox/relay
  its sessions, {_SESSION_SECONDS:.0f} s each           {address}/runs
  days to archive                     {address}/assets/outbox/archive?view=partitions
{_PER_SECOND:.0f} flights a second are planned, leave, arrive or are cancelled. Ctrl-C ends everything.
"""
