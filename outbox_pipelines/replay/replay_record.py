"""The record of replays in the database: read, moved forward, canceled.

Invariants:
- Importing this imports neither DuckDB nor pyarrow: `outbox status` shows replays too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from outbox_pipelines.config import parsed
from outbox_pipelines.database import Connection
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.measurements import STILL_SECONDS
from outbox_pipelines.replay import replay_sql
from outbox_pipelines.settings import OutboxSettings


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay as it is recorded."""

    id: UUID
    started_at: datetime
    actor: str
    on_behalf_of: str | None
    reason: str
    selection: dict[str, Any]
    target: str
    files: list[dict[str, str]]
    events: int
    last_seq: int
    position: int
    sent: int
    state: str
    """running, stopped, done or canceled."""
    error: str | None
    progress_at: datetime
    notes: list[str]
    """What retention and redaction had changed in the selected days of the archive."""

    @property
    def is_open(self) -> bool:
        """Whether it can be resumed."""
        return self.state in ("running", "stopped")

    @property
    def stands_still(self) -> bool:
        """Whether it is to run, and its process has reported nothing for a while."""
        silent = (datetime.now(self.progress_at.tzinfo) - self.progress_at).total_seconds()
        return self.state == "running" and silent > STILL_SECONDS


def recorded(settings: OutboxSettings) -> list[Replay]:
    """Return all replays, the newest first."""
    with connected(settings) as connection:
        return [Replay(*row) for row in connection.execute(replay_sql.LIST, {"id": None})]


def cancel(settings: OutboxSettings, replay: UUID) -> Replay:
    """Cancel a replay; a running process ends within two seconds.

    Raises:
        SetupError: there is none with this id, or it is over.
    """
    with connected(settings) as connection:
        found = get(connection, replay)
        if not found.is_open:
            raise SetupError(f"replay {replay} is {found.state}: there is nothing to cancel")
        advance(connection, replay, 0, 0, "canceled", None)
        return get(connection, replay)


def get(connection: Connection, replay: UUID) -> Replay:
    row = connection.execute(replay_sql.LIST, {"id": replay}).fetchone()
    if row is None:
        raise SetupError(f"there is no replay {replay}: see `outbox replay list`")
    return Replay(*row)


def advance(connection: Connection, replay: UUID, seq: int, sent: int, state: str, error: str | None) -> str:
    given = {"id": replay, "seq": seq, "sent": sent, "state": state, "error": error}
    ((now,),) = connection.execute(replay_sql.ADVANCE, given)
    return str(now)


@contextmanager
def connected(settings: OutboxSettings) -> Iterator[Connection]:
    parsed.refuse_existing_table(settings)
    with connect_to_outbox(settings, name="outbox replay") as connection:
        yield connection
