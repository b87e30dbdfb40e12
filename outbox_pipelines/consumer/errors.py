"""Errors that end a consumer, exceptions that a handler can raise, and their text."""

from __future__ import annotations

from typing import Literal

from outbox_pipelines.core.secret import redacted
from outbox_pipelines.core.text import reason
from outbox_pipelines.errors import OperatorError

Policy = Literal["retry", "dead_letter", "outage"]
"""What an exception of a handler means; see `on_error`."""


class ConsumerError(OperatorError):
    """The consumer cannot continue: Kafka's client or the tables cannot be used."""


class StoppedError(Exception):
    """The consumer was stopped while it waited for the database."""


class UnreadableError(ValueError):
    """A message is not an event, or no longer has a handler; it becomes a dead letter."""


class RefusedError(Exception):
    """Raised by a handler for an event that can never be handled: it becomes a dead letter immediately."""


class OutageError(Exception):
    """Raised by a handler if a service it needs is unavailable: the event is retried, no attempt counts."""


class HandlerTimeoutError(TimeoutError):
    """A handler was interrupted because it took too long: the event may be the cause."""


def error_text(error: BaseException) -> str:
    """Return an error as one line that PostgreSQL can store, without secrets."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the exception of a handler can be of any kind
        text = "its text cannot be read"
    return reason(redacted(" ".join(f"{type(error).__name__}: {text}".split())))


def readable(text: str) -> str:
    """Return the text without characters that PostgreSQL cannot store."""
    return text if text.isprintable() else ascii(text)
