"""Read partitions of topics from given offsets to their ends.

Invariants:
- An end is what the broker reports, not a number that is computed: control records and aborted messages use
  offsets too. The client must have `enable.partition.eof`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition


def read_to_ends(
    client: Consumer, starts: Sequence[TopicPartition], *, at_once: int = 10_000, seconds: float = 0.5
) -> Iterator[list[Any]]:
    """Yield messages in batches until each partition has ended.

    Args:
        at_once: the most messages of a batch; with 1, none waits for others.
        seconds: how long a batch is waited for; it is empty if none has come.

    Raises:
        KafkaException: an error that the client does not correct itself.
    """
    client.assign([*starts])
    unread = {(each.topic, each.partition) for each in starts}
    while unread:
        messages = []
        for message in client.consume(at_once, seconds):
            if (error := message.error()) is None:
                messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                unread.discard((str(message.topic()), message.partition() or 0))
            elif not error.retriable():
                raise KafkaException(error)
        yield messages
