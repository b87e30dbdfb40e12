"""The errors that a person has to act on; each message is one line: what is wrong, and how to mend it.

Invariants:
- Here is the one place where an error becomes text for people: no secret is in it, whoever made the message
  and wherever it goes (a terminal, a log, Dagster's events, an alert, a table).
"""

from __future__ import annotations

from outbox_pipelines.secret import redacted


class OperatorError(Exception):
    """One whose message is for people."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class SetupError(OperatorError):
    """Something outside of the code must be mended first; commands print it and exit with 2."""


class NotReadyError(SetupError):
    """What is asked for cannot be done yet; commands print it and exit with 1."""


class UnavailableError(SetupError):
    """A server does not answer: at the start a setting to be mended, later an outage, which passes."""
