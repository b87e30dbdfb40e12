"""What ends a consumer."""

from __future__ import annotations


class ConsumerError(Exception):
    """It cannot go on: Kafka's client, or its tables, refuse."""


class UnreadableError(ValueError):
    """A message is no event, or one that nobody handles any more; it becomes a dead letter."""
