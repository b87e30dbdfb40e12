"""Notices a client of Kafka that stands still for good, while others do not.

Such a client reports nothing. Each was seen with librdkafka after a broker had stood still for seconds:

- it has asked for brokers when the cluster knew of none, and never finds one again
  (confluentinc/librdkafka#5301);
- its question for committed offsets was lost, so that it has partitions and never reads them (#5586);
- it waits for metadata, and never joins the group.

Invariants:
- Asks every ten seconds; while messages arrive, only what the client itself remembers.
- A client is lost only if a new one, with the same settings, finds three times in a row what it does not.
  During an outage no client is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import confluent_kafka
from confluent_kafka import KafkaException, TopicPartition

_EVERY_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 1.0
# A client that is about to connect again, or to read, has done so the second time.
_MOST_FOUND: Final = 3


class LostClients:
    """The questions to one client after another.

    Args:
        new_client: makes a client with the same settings, to ask whether others find a broker.
        topic: one that the group reads.
    """

    def __init__(self, new_client: Callable[[], confluent_kafka.Consumer], topic: str) -> None:
        self._new_client = new_client
        self._any_partition = TopicPartition(topic, 0)
        self._found = 0
        self._ask_at = 0.0
        self.renewed()
        self.has_answered = False
        """Whether a broker has answered the client since it reported the last outage."""

    def failed(self) -> None:
        """Record that the client has no connection to any broker."""
        self.has_answered = False

    def renewed(self) -> None:
        """There is another client."""
        self._found = 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS

    def are_lost(self, client: confluent_kafka.Consumer, *, is_idle: bool) -> bool:
        """Return whether the client has stood still three times in a row, and new ones have not.

        Args:
            is_idle: no message has arrived in the last poll.
        """
        if not is_idle:
            self.has_answered = True
        if time.monotonic() < self._ask_at:
            return False
        if is_idle and not _answers(client):
            is_lost = self._other_finds(_answers)
        else:
            self.has_answered = True
            is_lost = self._stands_still(client, is_idle)
        self._found = self._found + 1 if is_lost else 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS
        return self._found >= _MOST_FOUND

    def _stands_still(self, client: confluent_kafka.Consumer, is_idle: bool) -> bool:
        if not client.memberid():
            # Any answer of the group's coordinator is sufficient.
            return self._other_finds(lambda other: _committed(other, self._any_partition) is not None)
        # It has received nothing of these, not even that there is nothing.
        unread = [at for at in client.assignment() if client.get_watermark_offsets(at, cached=True)[1] < 0]
        if unread:
            return self._other_finds(lambda other: _end(other, unread[0]) is not None)
        if not is_idle:
            return False
        # Without a message since they were assigned. They may have been known from an earlier assignment.
        fresh = [at for at in client.position(client.assignment()) if at.offset < 0]
        return bool(fresh) and self._other_finds(lambda other: any(_is_behind(other, at) for at in fresh))

    def _other_finds(self, finds: Callable[[confluent_kafka.Consumer], bool]) -> bool:
        with closing(self._new_client()) as other:
            try:
                return finds(other)
            except KafkaException:
                return False


def _answers(client: confluent_kafka.Consumer) -> bool:
    try:
        # Any answer is sufficient: no topic has an empty name, so the answer is small.
        client.list_topics("", timeout=_ANSWER_SECONDS)
    except KafkaException:
        return False
    return True


def _committed(other: confluent_kafka.Consumer, at: TopicPartition) -> int | None:
    """Return the offset that the group has committed, negative where it has none; None: no answer."""
    [found] = other.committed([TopicPartition(at.topic, at.partition)], timeout=_ANSWER_SECONDS)
    return None if found.error else found.offset


def _end(other: confluent_kafka.Consumer, at: TopicPartition) -> int | None:
    _, end = other.get_watermark_offsets(at, timeout=_ANSWER_SECONDS)
    return end


def _is_behind(other: confluent_kafka.Consumer, at: TopicPartition) -> bool:
    """Return whether the partition has messages that the group has not handled."""
    start, end = other.get_watermark_offsets(at, timeout=_ANSWER_SECONDS)
    done = _committed(other, at)
    return done is not None and max(start, done) < end
