"""Changes the number of shards while writers and relays go on: at a barrier.

Invariants:
- Every relay first settles all that it has read and stops; then all publish exactly up to one snapshot; then
  the new shards start from it. So no event is published by an old shard after a new one has begun.
- The one who changes says all the time that it lives. Without a word for ten seconds the relays go on as
  before; a change that is given up leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.position import Snapshot
from outbox_pipelines.relay import queries
from outbox_pipelines.settings import Settings

MOST_SHARDS = 64
_POLL_SECONDS = 0.05


class NotAllThereError(Exception):
    """Some shards did not come to the barrier in time; the message says which."""


def change(
    settings: Settings,
    wanted: int,
    *,
    seconds: float = 60.0,
    actor: str | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> bool:
    """Makes so many shards; False where there are as many already. A change under way to so many is joined.

    Args:
        actor: on whose behalf, for the audit.
        on_wait: told what is waited for, when that changes.

    Raises:
        SetupError: there can be no such number.
        NotAllThereError: not all relays came; everything goes on as before.
    """
    if not 1 <= wanted <= MOST_SHARDS:
        raise SetupError(f"{wanted} shards: choose 1 to {MOST_SHARDS}")
    with connect(settings, name="outbox shards set") as connection:
        deadline = time.monotonic() + seconds
        started = False
        waiting = ""
        try:
            while True:
                row = connection.execute(
                    queries.CHANGE_SHARDS, {"wanted": wanted, "started": started, "on_behalf_of": actor}
                ).fetchone()
                assert row is not None
                step, missing = row
                if step in ("nothing", "done"):
                    return bool(step == "done")
                if step == "busy":
                    raise SetupError(f"a change to {missing} shards is under way: wait for its end")
                if step == "given up":
                    raise NotAllThereError(
                        "the change was given up: the log of a relay says why; nothing was changed"
                    )
                started = True
                if missing != waiting:
                    waiting = missing
                    on_wait(missing)
                if time.monotonic() > deadline:
                    raise NotAllThereError(f"{missing}; nothing was changed")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            if started:
                connection.execute(queries.KEEP_SHARDS)
            raise


class Change:
    """A change as a relay sees it, through the connection of its reader.

    Args:
        key: the shard, and the epoch in which the relay holds it.
    """

    def __init__(self, connection: Connection, key: dict[str, int]) -> None:
        self._connection = connection
        self._key = key
        self.is_wanted = False
        self.wanted = 0
        """How many shards there are to be."""
        self.is_over = False
        """Whether the new shards have begun: this relay is none of them."""
        self.barrier_paused = False
        self.barrier_reached = False
        self.barrier: Snapshot | None = None

    def look(self) -> bool:
        """Whether a change is wanted, as of now."""
        row = self._connection.execute(queries.CHANGE, self._key, prepare=True).fetchone()
        self.is_over = row is None or row[0] != self._key["epoch"]
        self.is_wanted = row is not None and row[1] is not None and not self.is_over
        if row is not None:
            self.wanted, self.barrier_paused, self.barrier_reached = row[1] or 0, row[3], row[4]
        self.barrier = Snapshot.parse(row[2]) if row is not None and row[2] is not None else None
        if self.is_wanted:
            self._connection.execute(queries.UNWANT_FORGOTTEN)
        return self.is_wanted

    def give_up(self) -> None:
        """Everything goes on as before."""
        self._connection.execute(queries.UNWANT, {"wanted": self.wanted})

    def pause(self, done: Snapshot) -> None:
        """Says, once it is so, that all is settled up to here; nothing more is read."""
        self._connection.execute(queries.PAUSED, {**self._key, "done": str(done)})

    def arrive(self) -> None:
        """Says, once it is so, that all is settled up to the barrier."""
        self._connection.execute(queries.REACHED, self._key)
