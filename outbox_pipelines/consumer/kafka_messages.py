"""What a message of Kafka says of itself, whatever is in it.

Invariants:
- A foreign message can have any headers and any time: neither ends a consumer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from confluent_kafka import Message

Partition = tuple[str, int]
"""Topic and partition."""

# What both Python and PostgreSQL have as a time, in every time zone.
_LATEST_MS: Final = int(datetime(9999, 1, 1, tzinfo=UTC).timestamp() * 1000)
# Not `message.headers()`: the client's function fails on a name that is not UTF-8 and returns a list all the
# same. Only a call through here is checked for that by every version of Python.
_headers: Final[Callable[[Message], Any]] = operator.methodcaller("headers")


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message, in order; an empty list if a name is not UTF-8."""
    try:
        # As confluent-kafka gives them; its types allow more.
        return _headers(message) or []
    except (SystemError, UnicodeDecodeError):
        # The client keeps an incomplete list; an access to it would crash the process.
        message.set_headers([])
        return []


def sent_at(message: Message) -> datetime:
    """Return the time when a message was written to Kafka, UTC."""
    return as_time(message.timestamp()[1])


def sent_ms(message: Message) -> int:
    """Return the same in ms since 1970."""
    return existing_ms(message.timestamp()[1])


def as_time(ms: int) -> datetime:
    """Return a time in ms since 1970, UTC."""
    return datetime.fromtimestamp(existing_ms(ms) / 1000, UTC)


def existing_ms(ms: int) -> int:
    """Return the nearest time that exists: a producer may write any number."""
    return min(max(ms, 0), _LATEST_MS)


def partition_of(message: Any) -> Partition:
    """Return the partition of a message."""
    return str(message.topic()), message.partition() or 0


def described(message: Message) -> str:
    """Return the topic, partition and offset of a message, for messages and logs."""
    return f"the message at {message.topic()}, partition {message.partition()}, offset {message.offset()}"
