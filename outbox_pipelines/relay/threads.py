"""The threads of a relay's worker: the first failure of any of them is that of the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import psycopg

from outbox_pipelines.core import log
from outbox_pipelines.core.sqlstates import is_outage
from outbox_pipelines.relay.core.errors import ShardLostError


class Threads:
    """Threads that report their failure.

    Args:
        on_failure: called after each failure.

    Attributes:
        failure: the first one.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self._on_failure = on_failure
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Report a failure."""
        self.failure = self.failure or error
        self._on_failure()

    def guard(self, body: Callable[[], None]) -> None:
        """Call this, and report its failure."""
        try:
            body()
        except psycopg.OperationalError as error:
            self.fail(
                ShardLostError(f"the connection to the database is lost: {error}")
                if is_outage(error)
                else error
            )
        except BaseException as error:  # noqa: BLE001 - raised by the worker
            self.fail(error)

    def start(self, body: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread."""
        thread = threading.Thread(target=log.inherit(partial(self.guard, body)), name=name, daemon=True)
        thread.start()
        return thread
