"""Errors that end a consumer, and exceptions that a handler can raise."""

from __future__ import annotations

from typing import Literal

from outbox_pipelines.errors import OperatorError

Policy = Literal["retry", "dead_letter", "outage"]
"""What an exception of a handler means; see `on_error`."""


class ConsumerError(OperatorError):
    """The consumer cannot continue: Kafka's client or the tables cannot be used."""


class UnreadableError(ValueError):
    """A message is not an event, or no longer has a handler; it becomes a dead letter."""


class RefusedError(Exception):
    """Raised by a handler for an event that can never be handled: it becomes a dead letter immediately."""


class OutageError(Exception):
    """Raised by a handler if a service it needs is unavailable: the event is retried, no attempt counts."""


class HandlerTimeoutError(TimeoutError):
    """A handler was interrupted because it took too long: the event may be the cause."""
