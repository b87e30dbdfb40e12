"""Repeat what the database has not done: after a conflict immediately, in an outage when it is available.

Invariants:
- A wait counts as no attempt. If a connection is lost after the handler was called, the attempt counts: the
  event may be what crashed the server's process.
- A start waits too, but not for what waiting does not help; a run until empty reports the outage.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from outbox_pipelines import errors
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.consumer_database import Database, is_worth_a_repetition
from outbox_pipelines.consumer.errors import ConsumerError, StoppedError, error_text
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.core.outages import is_outage, is_refused
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_TRIES: Final = 3
_LONGEST_PAUSE: Final = 5.0
_AVAILABLE: Final = "the database is available again"


class DatabaseRetry:
    """Operations that outlast an outage; must be used by one thread or task."""

    def __init__(self, plan: Plan, database: Database) -> None:
        self.awaits = ""
        """What is waited for: the "handler", or an answer of the "database" to a statement of ours."""
        self.is_called = False
        """Whether the handler was called in the last attempt."""
        self._plan = plan
        self._database = database
        self._has_begun = False
        """Whether the database has answered since the start."""
        self._lines = RepeatedLines(_LOG)
        self._safe_at = -1
        """How many warnings the database had given when all commits were known to be safe; -1: unknown."""

    async def attempt(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeat an attempt at an event after a serialization failure or deadlock; if the database is
        unavailable before the handler is called, repeat it when the database is available again.

        Raises:
            StoppedError: the consumer was stopped while it waited.
        """
        tries, pause = 1, 0.0
        while True:
            self.is_called, self.awaits = False, "database"
            try:
                done = await do()
            except Exception as error:
                if is_outage(error):
                    self._safe_at = -1
                if is_worth_a_repetition(error):
                    if tries == _TRIES:
                        raise
                    tries += 1
                    await self._plan.stay()
                elif isinstance(error, SetupError) or self.is_called or not is_outage(error):
                    raise
                else:
                    pause = await self._wait(error, pause)
            else:
                if pause:
                    self._lines.end("database", _AVAILABLE)
                return done
            finally:
                self.awaits = ""

    async def run(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run an operation without a handler; while the database is unavailable, wait and repeat it.

        Raises:
            StoppedError: the consumer was stopped while it waited.
            ConsumerError: the tables cannot be used.
        """
        pause = 0.0
        while True:
            self.awaits = "database"
            try:
                done = await do()
            except Exception as error:
                if isinstance(error, SetupError):
                    raise
                if not is_outage(error):
                    raise ConsumerError(
                        f"the consumer's tables cannot be used: {error_text(error)}"
                    ) from error
                if not self._has_begun:
                    self._require_patience(error)
                pause = await self._wait(error, pause)
            else:
                self._has_begun = True
                if pause:
                    self._lines.end("database", _AVAILABLE)
                return done
            finally:
                self.awaits = ""

    def distrust(self) -> None:
        """Record that what another session has committed can be in this server alone."""
        self._safe_at = -1

    async def secure(self) -> None:
        """Wait until a failover cannot undo what is committed; usually that is known from the commits.

        What another session, or one whose connection was lost, has committed can be in this server alone.
        """
        while self._safe_at != self._database.warnings:
            warnings = self._database.warnings
            await self.run(self._reach_standbys)
            self._safe_at = warnings

    async def _reach_standbys(self) -> None:
        async with self._database.transaction() as transaction:
            await self._database.rows(transaction, queries.REACH_STANDBYS, {})

    def _require_patience(self, error: Exception) -> None:
        """Raise `UnavailableError` if a start must not wait, or waiting does not help."""
        is_hopeless = is_refused(error)
        if is_hopeless or not self._plan.waits:
            kind = errors.RefusedError if is_hopeless else errors.UnavailableError
            raise kind(
                f"the consumer {self._plan.source} cannot use its database: {error_text(error)}"
            ) from error

    async def _wait(self, error: Exception, pause: float) -> float:
        """Wait longer than the last time; return for how long.

        Raises:
            StoppedError: the consumer was stopped while it waited.
        """
        self._lines.log("database", "the database is unavailable; waiting for it: %s", error_text(error))
        self._safe_at = -1
        pause = min(2 * pause or 0.1, _LONGEST_PAUSE)
        await self._plan.pause(pause)
        if self._plan.is_stopped():
            raise StoppedError
        return pause
