"""What ends a consumer."""

from __future__ import annotations

from outbox_pipelines.errors import OperatorError


class ConsumerError(OperatorError):
    """It cannot go on: Kafka's client, or its tables, refuse."""


class UnreadableError(ValueError):
    """A message is no event, or one that nobody handles any more; it becomes a dead letter."""
