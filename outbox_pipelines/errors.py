"""The errors that an operator has to act on; each message is one line: what is wrong, and how to correct it.

Invariants:
- All error messages for people are made here, so that none contains a secret, whatever its source and
  destination (a terminal, a log, Dagster's events, an alert, a table).
"""

from __future__ import annotations

from outbox_pipelines import Error
from outbox_pipelines.core.secret import redacted


class OperatorError(Error):
    """An error whose message is for people."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class SetupError(OperatorError):
    """A usage or configuration error; commands print it and exit with 2."""


class NotReadyError(SetupError):
    """The requested action is not possible yet; commands print the error and exit with 1."""


class UnavailableError(SetupError):
    """A server does not answer: at the start a wrong setting, later a temporary outage."""


class RefusedError(UnavailableError):
    """A server answers and refuses the connection: at the start of a service, waiting does not help."""


class LockedError(UnavailableError):
    """Another session has locked a table for longer than a command waits."""
