"""What ends a consumer, and what a handler can say about its failure."""

from __future__ import annotations

from outbox_pipelines.errors import OperatorError


class ConsumerError(OperatorError):
    """It cannot go on: Kafka's client, or its tables, refuse."""


class UnreadableError(ValueError):
    """A message is no event, or one that nobody handles any more; it becomes a dead letter."""


class RefusedError(Exception):
    """Raised by a handler: this event will never be handled. It becomes a dead letter at once."""


class OutageError(Exception):
    """Raised by a handler: what it needs is away. The event is tried again later, and no attempt counts."""
