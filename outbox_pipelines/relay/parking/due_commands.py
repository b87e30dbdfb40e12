"""Runs the operator's command for dead letters of the append-only outbox; the table records where it is due.

Invariants:
- The command runs at least once for each dead letter, however the relay ends: see `notify`.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Final

import psycopg

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.parking import queries
from outbox_pipelines.relay.parking.notify import DeadLetterRuns, describe
from outbox_pipelines.relay.shard import Shard
from outbox_pipelines.settings import Settings

# Dead letters in the queue; all others wait in the table.
_MOST: Final = 16
_EVERY: Final = 1.0
_LOOK_SECONDS: Final = 0.02


class DueCommands:
    """Runs the command for the dead letters of a shard; uses the session that owns the shard."""

    def __init__(self, settings: Settings, shard: Shard) -> None:
        self._shard = shard
        self._is_wanted = bool(settings.dead_letter_command)
        self._runs = DeadLetterRuns(settings.dead_letter_command.reveal(), most=_MOST)
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Start as many commands as there is room for, and record which have run."""
        if not self._is_wanted:
            return
        if ran := self._runs.done():
            self._shard.execute(queries.COMMANDS_RAN, {"seqs": ran})
            self._look_at = 0.0
        room = self._runs.room
        if now < self._look_at or not room:
            return
        self._look_at = now + _EVERY
        found = {"room": room, "under_way": self._runs.under_way()}
        for row in self._shard.execute(queries.COMMANDS, found):
            *columns, attempts, error = row
            event = Event._make([*columns, "", None])
            remedy = f"outbox dead-letters show {event.id}"
            self._runs.submit(event.seq, describe(event, attempts, error, remedy=remedy))

    def close(self, seconds: float) -> None:
        """Wait for the commands for at most `seconds`; the others run later."""
        # If the session is lost, they run again.
        with suppress(ShardLostError, psycopg.Error):
            deadline = time.monotonic() + seconds
            self.look(math.inf)
            while not self._runs.wait(_LOOK_SECONDS) and time.monotonic() < deadline:
                # Also a heartbeat.
                self._shard.execute(queries.COMMANDS_RAN, {"seqs": self._runs.done()})
                self.look(math.inf)
        self._runs.close()
        with suppress(ShardLostError, psycopg.Error):
            self.look(-math.inf)
