"""Where a source is in each partition: `processed_offsets`, for `dedupe="offset"`.

Invariants:
- Events before `start` are identified by id; those from there to `next` are done; the others are new.
- The topic in Kafka is compared with that of the record when the first message of an assignment arrives, and
  whenever offsets go back: offsets of another topic, or of a topic that was created again, mean other events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outbox_pipelines.consumer import queries
from outbox_pipelines.consumer.inbox import array
from outbox_pipelines.consumer.transactions import Database
from outbox_pipelines.errors import SetupError

# Topic and partition.
Place = tuple[str, int]


class MovedError(Exception):
    """Offsets of these partitions were recorded by another process, or by a commit whose answer was lost."""


@dataclass(frozen=True, slots=True)
class Found:
    """What Kafka has of a partition whose first message has arrived."""

    topic_id: str
    first: int
    """The offset of that message."""
    end: int
    """The offset behind the last message."""


@dataclass(slots=True)
class Position:
    """Of one partition, as this process knows it."""

    start: int
    next: int


class Positions:
    """The positions of one source; must be used by one thread or task."""

    def __init__(self, database: Database, source: str) -> None:
        self._database = database
        self._source = source
        self._of: dict[Place, Position] = {}
        # The offsets of the last messages that have arrived.
        self._seen: dict[Place, int] = {}

    def unknown(self, messages: Sequence[Any]) -> dict[Place, int]:
        """Return the partitions that Kafka must be asked about, each with the offset of its first message."""
        first: dict[Place, int] = {}
        for message in messages:
            place, offset = place_of(message), message.offset()
            if place not in self._of or offset <= self._seen.get(place, -1):
                first.setdefault(place, offset)
            self._seen[place] = offset
        return first

    async def find(self, found: Mapping[Place, Found]) -> None:
        """Read the positions of partitions; where there is none, begin.

        Raises:
            SetupError: the record is of another topic, or Kafka has lost messages that were handled.
        """
        places = sorted(found)
        given = {
            **self._places(places),
            "topic_ids": array([found[each].topic_id for each in places]),
            "firsts": _numbers(found[each].first for each in places),
            "ends": _numbers(found[each].end for each in places),
        }
        async with self._database.transaction() as transaction:
            await self._database.rows(transaction, queries.BEGIN_OFFSETS, given)
            rows = await self._database.rows(transaction, queries.OFFSETS, given)
        for topic, partition, topic_id, start, following in rows:
            there = found[topic, partition]
            command = f"outbox consumer offsets forget {self._source} --topic {topic}"
            if topic_id != there.topic_id:
                raise SetupError(
                    f"{self._source} has recorded offsets of another topic {topic} (id {topic_id}, now "
                    f"{there.topic_id}): it was created again, or is in another cluster. No event was "
                    f"skipped. If all of its events are new, run: {command}"
                )
            if following > there.end:
                raise SetupError(
                    f"{topic}, partition {partition} ends at offset {there.end}, but {self._source} has "
                    f"handled events up to {following}: Kafka has lost messages and can use their offsets "
                    f"again. If events that are handled again do no harm, run: {command}"
                )
            self._of[topic, partition] = Position(start, following)

    async def reload(self, places: Iterable[Place]) -> None:
        """Read what other processes have recorded."""
        wanted = sorted(set(places))
        given = self._places(wanted)
        async with self._database.transaction() as transaction:
            rows = await self._database.rows(transaction, queries.OFFSETS, given)
        there = {(topic, partition): following for topic, partition, _, _, following in rows}
        for place in wanted:
            if place not in there:
                raise SetupError(
                    f"the offsets of {self._source} were deleted while it was running: start it again"
                )
            self._of[place].next = there[place]

    def forget(self, places: Iterable[Place]) -> None:
        """Forget partitions that come or go: another process may move their offsets."""
        for place in places:
            self._of.pop(place, None)
            self._seen.pop(place, None)

    def is_by_offset(self, message: Any) -> bool:
        """Return whether a message is identified by its offset, not its id."""
        return bool(message.offset() >= self._of[place_of(message)].start)

    def is_past(self, message: Any) -> bool:
        """Return whether a message that is identified by its offset was handled."""
        return bool(message.offset() < self._of[place_of(message)].next)

    def behind(self, messages: Sequence[Any]) -> dict[str, Any]:
        """Return the parameters of MOVE: from the known offsets to those behind the messages.

        Raises:
            MovedError: one of the messages was handled; offsets do not go back.
        """
        of = [place_of(each) for each in messages]
        last = dict(zip(of, messages, strict=True))
        # They are in order, so that only the first of a partition must be looked at.
        first = dict(zip(reversed(of), reversed(messages), strict=True))
        if any(each.offset() < self._of[place].next for place, each in first.items()):
            raise MovedError
        places = sorted(last)
        return {
            **self._places(places),
            "count": len(places),
            "expected": _numbers(self._of[each].next for each in places),
            "following": _numbers(last[each].offset() + 1 for each in places),
        }

    def moved(self, messages: Sequence[Any]) -> None:
        """The database has committed MOVE of these messages."""
        for message in {place_of(each): each for each in messages}.values():
            self._of[place_of(message)].next = message.offset() + 1

    def _places(self, places: Sequence[Place]) -> dict[str, Any]:
        return {
            "source": self._source,
            "topics": array([topic for topic, _ in places]),
            "partitions": _numbers(partition for _, partition in places),
        }


def place_of(message: Any) -> Place:
    """Return the partition of a message."""
    return str(message.topic()), message.partition() or 0


def _numbers(numbers: Iterable[int]) -> str:
    """Return PostgreSQL's text of an array."""
    return "{" + ",".join(map(str, numbers)) + "}"
