"""Changes the number of shards online, at a barrier, while writers and relays continue.

Invariants:
- Nothing pauses before each shard has a relay: a change that cannot succeed does not begin.
- First every relay settles all events that it has read, and pauses. Then all relays publish exactly up to one
  snapshot. Then the new shards start from it. So no old shard publishes an event after a new one has begun.
- The process that makes the change sends heartbeats. After ten seconds without one, the relays continue as
  before. An abandoned change leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psycopg

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.settings import OutboxSettings

MOST_SHARDS = 64
_POLL_SECONDS = 0.05


class NotAllThereError(Exception):
    """Some shards have no relay, or did not reach the barrier in time; the message says which."""


def change(
    settings: OutboxSettings,
    wanted: int,
    *,
    seconds: float = 60.0,
    actor: str | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> bool:
    """Change the number of shards; return False if it is that number already.

    If a change to the same number is in progress, this call joins it.

    Args:
        wanted: the new number of shards.
        seconds: how long to wait for the relays, at most. Publishing continues while a shard has no relay,
            and pauses while the relays proceed to the barrier.
        actor: the person on whose behalf the change is made, for the audit.
        on_wait: called with a text that says what the change waits for, when that text changes.

    Raises:
        SetupError: the number is not allowed, or a change to another number is in progress.
        NotAllThereError: a shard has no relay, so that nothing began; or not all relays reached the
            barrier, and everything continues as before.
    """
    if not 1 <= wanted <= MOST_SHARDS:
        raise SetupError(f"{wanted} shards are not possible: choose 1 to {MOST_SHARDS}")
    with connect(settings, name="outbox shards set") as connection:
        wait = _Wait(seconds, on_wait)
        # Publishing continues until each shard has a relay, for example one that is starting.
        parameters = {"wanted": wanted, "lock": f"{settings.db_schema}.outbox_shards"}
        while (shards := connection.execute(relay_sql.UNOWNED, parameters).fetchall()[0][0]) is not None:
            wait.for_(f"no relay owns shard {shards} (see `outbox shards`): start `outbox relay`")
        started = False
        try:
            while True:
                asked = {"wanted": wanted, "started": started, "on_behalf_of": actor}
                ((step, missing),) = connection.execute(relay_sql.CHANGE_SHARDS, asked)
                if step in ("nothing", "done"):
                    return bool(step == "done")
                if step == "busy":
                    raise SetupError(f"a change to {missing} shards is in progress: wait until it ends")
                if step == "given up":
                    raise NotAllThereError(
                        "the change was abandoned; nothing was changed. See the relays' logs for the reason"
                    )
                started = True
                wait.for_(missing)
        except BaseException:
            if started:
                # Without it, the relays continue after ten seconds: its failure must not hide the first one.
                with suppress(psycopg.Error):
                    connection.execute(relay_sql.KEEP_SHARDS)
            raise


class _Wait:
    """Waits until a deadline, and says for what, when that changes."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._deadline = time.monotonic() + seconds
        self._say = say
        self._said = ""

    def for_(self, missing: str) -> None:
        """Wait a moment; raise `NotAllThereError` after the deadline."""
        if missing != self._said:
            self._said = missing
            self._say(missing)
        if time.monotonic() > self._deadline:
            raise NotAllThereError(f"{missing}; nothing was changed")
        time.sleep(_POLL_SECONDS)


class OperatorChange:
    """What operators change under a relay, as its reader sees it: the number of shards, the slot.

    Args:
        key: the shard, and the epoch in which the relay owns it.
        row_address: returns where the row of the shard was last seen in its table; it may have moved.
    """

    def __init__(self, connection: Connection, key: dict[str, int], row_address: Callable[[], str]) -> None:
        self._connection = connection
        self._key = key
        self._row_address = row_address
        self.is_wanted = False
        self.wanted = 0
        """The new number of shards."""
        self.is_over = False
        """Whether the new shards have begun: this relay owns none of them."""
        self.barrier_paused = False
        self.barrier_reached = False
        self.barrier: Snapshot | None = None
        self.slot: str | None = None
        """The replication slot to read; None for reading between snapshots."""
        self.slot_begins: Snapshot | None = None
        """The slot delivers what this snapshot does not see."""
        self.slot_error: str | None = None
        """Why the slot could not be read, as it is recorded."""

    def look(self) -> bool:
        """Read the state of it; return whether another number of shards is requested."""
        parameters = {**self._key, "ctid": self._row_address()}
        row = self._connection.execute(relay_sql.CHANGE_AT, parameters, prepare=True).fetchone()
        if row is None:
            row = self._connection.execute(relay_sql.CHANGE, self._key, prepare=True).fetchone()
        self.is_over = row is None or row[0] != self._key["epoch"]
        self.is_wanted = row is not None and row[1] is not None and not self.is_over
        if row is not None:
            self.wanted, self.barrier_paused, self.barrier_reached = row[1] or 0, row[3], row[4]
            self.slot, begins, self.slot_error = row[5:]
            self.slot_begins = None if begins is None else Snapshot.parse(begins)
        self.barrier = Snapshot.parse(row[2]) if row is not None and row[2] is not None else None
        if self.is_wanted:
            self._connection.execute(relay_sql.UNWANT_FORGOTTEN)
        return self.is_wanted

    def give_up(self) -> None:
        """Cancel the change: everything continues as before."""
        self._connection.execute(relay_sql.UNWANT, {"wanted": self.wanted})

    def pause(self, done: Snapshot) -> None:
        """Record that everything up to `done` is settled and that this relay reads nothing more."""
        self._connection.execute(relay_sql.PAUSED, {**self._key, "done": str(done)})

    def arrive(self) -> None:
        """Record that everything up to the barrier is settled."""
        self._connection.execute(relay_sql.REACHED, self._key)
