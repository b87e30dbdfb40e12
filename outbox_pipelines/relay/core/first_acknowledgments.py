"""Which partitions a producer has begun; before that, one event of a key is in flight at a time.

By its sequence number, a broker knows that a message follows a refused one, and refuses it as well. That
holds only on partitions where it has accepted a message of the producer before; elsewhere it accepts any
number. If the first request to a partition is refused while the next is in flight, the events of the next
overtake it; neither idempotence nor `enable.gapless.guarantee` prevents this (measured with Kafka 4.1).

Invariants:
- A second event of a key is sent only after one of the key, or of each partition, was acknowledged.
- For one thread.
"""

from __future__ import annotations


class FirstAcknowledgments:
    """What one producer has begun; one object for each producer."""

    def __init__(self) -> None:
        self._partitions: dict[str, set[int]] = {}
        """By topic: the partitions that have acknowledged something."""
        self._keys: dict[str, dict[str, bool]] = {}
        """By topic and key: whether an event of it was acknowledged; False while the first is in flight."""

    def are_complete(self, topic: str, partitions: int) -> bool:
        """Return whether each partition of a topic has acknowledged something: any event may be sent."""
        return len(self._partitions.get(topic, ())) >= partitions

    def is_awaited(self, topic: str, key: str) -> bool:
        """Return whether an event of this key is in flight, and none of it was acknowledged before."""
        return not self._keys.get(topic, {}).get(key, True)

    def sent(self, topic: str, key: str) -> None:
        """Count an event that was handed to the producer."""
        self._keys.setdefault(topic, {}).setdefault(key, False)

    def acknowledge(self, topic: str, key: str, partition: int) -> bool:
        """Count an acknowledgment; return whether it is the first of its partition."""
        self._keys.setdefault(topic, {})[key] = True
        partitions = self._partitions.setdefault(topic, set())
        is_first = partition not in partitions
        partitions.add(partition)
        return is_first
