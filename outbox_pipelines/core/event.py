"""An event, as the relay reads it from a row of the outbox."""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import Final, NamedTuple


class Event(NamedTuple):
    """One row of the outbox, as the relay reads it. A tuple, because a drain makes 200,000 a second."""

    seq: int
    """Negative if the row has none: a number that holds in this process."""
    id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str
    """The body, JSON as PostgreSQL prints it."""
    metadata: str | None
    """A JSON object of the other columns that are not null; None if all are null, as for most events. It
    contains the event's time as `created-at` if the source reads it."""

    @property
    def own_seq(self) -> int | None:
        """The `seq` of its row; None if its table has none."""
        return self.seq if self.seq >= 0 else None

    def __str__(self) -> str:
        aggregate = f"{self.aggregate_type} {self.aggregate_id}"
        seq = "" if self.own_seq is None else f"seq {self.seq}, "
        return f"event {self.id} ({seq}{self.event_type} of {aggregate})"


def weigh(events: Iterable[Event]) -> int:
    """Return how many bytes of memory the text of events takes, all columns together, or a few more.

    One character beyond Latin makes Python store the whole text in two or four bytes a character, so that the
    number of characters would say too little.
    """
    columns = list(zip(*events, strict=True))
    if not columns:
        return 0
    _, _, aggregate_types, aggregate_ids, event_types, payloads, metadata = columns
    return (
        getsizeof("".join(aggregate_types))
        + getsizeof("".join(aggregate_ids))
        + getsizeof("".join(event_types))
        + getsizeof("".join(payloads))
        + getsizeof("".join(filter(None, metadata)))
    )


def weigh_one(event: Event) -> int:
    """Return the same of one event, in less time."""
    return sum(map(getsizeof, event[2:6])) + getsizeof(event.metadata or "")


LARGE: Final = 16_000_000
"""Bytes in memory from which an event is published and settled before the next one of that size is read."""
