"""Notices a client of Kafka that has lost all brokers, while others find them.

Such a client never finds one again and reports nothing (confluentinc/librdkafka#5301): it was told of no
broker, at a moment in which the cluster knew of none.

Invariants:
- Asks only while no message arrives, every ten seconds.
- During an outage, when nobody finds a broker, no client counts as lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import confluent_kafka
from confluent_kafka import KafkaException

_EVERY_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 1.0
# A client that is about to connect again answers the second time.
_MOST_UNANSWERED: Final = 3


class LostBrokers:
    """The questions to one client after another.

    Args:
        new_client: makes a client with the same settings, to ask whether others find a broker.
    """

    def __init__(self, new_client: Callable[[], confluent_kafka.Consumer]) -> None:
        self._new_client = new_client
        self._unanswered = 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS
        self.has_answered = False
        """Whether a broker has answered the client since it reported the last outage."""

    def failed(self) -> None:
        """Record that the client has no connection to any broker."""
        self.has_answered = False

    def received(self) -> None:
        """Messages have arrived."""
        self._unanswered = 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS
        self.has_answered = True

    def are_lost(self, client: confluent_kafka.Consumer) -> bool:
        """Return whether the client has not answered three times in a row, and new ones have."""
        if time.monotonic() < self._ask_at:
            return False
        if self._answers(client):
            self._unanswered = 0
            self.has_answered = True
        else:
            with closing(self._new_client()) as other:
                self._unanswered = self._unanswered + 1 if self._answers(other) else 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS
        return self._unanswered >= _MOST_UNANSWERED

    def _answers(self, client: confluent_kafka.Consumer) -> bool:
        try:
            # Any answer is sufficient: no topic has an empty name, so the answer is small.
            client.list_topics("", timeout=_ANSWER_SECONDS)
        except KafkaException:
            return False
        return True
