"""The crash guard of a consumer: who owns a partition, so that what crashes it is tried in the inbox.

Invariants:
- While another process owns a partition's row in `partition_owners`, its new events go through the inbox,
  where attempts are counted before they begin. This process takes the row if it is free, or after as many
  events as its owner can have been processing when it crashed.
- After the first crash within batches this process takes the row at once and handles events together; the row
  counts the crash until as many events have passed. After another one before that, they go through the inbox.
- A clean end, or the revocation of a partition, removes this process's rows. A lost row costs one more crash,
  never an event; a stale row costs time.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from typing import Any, Final

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.consumer_database import Database, Rows
from outbox_pipelines.consumer.kafka_messages import Place

_LOG: Final = logging.getLogger(__name__)


class CrashGuard:
    """The partitions of one run of a consumer; must be used by one thread or task."""

    def __init__(self, database: Database, source: str, group: str) -> None:
        self._database = database
        self._same = {"source": source, "group": group, "owner": str(uuid.uuid4())}
        self._owned: set[Place] = set()
        # How many more events of a partition can crash the process; through the inbox if it is not owned.
        self._suspect: dict[Place, int] = {}

    @property
    def is_unsure(self) -> bool:
        """Whether there are partitions of which it has to know what has `passed`."""
        return bool(self._suspect)

    @property
    def suspects(self) -> Collection[Place]:
        """Partitions whose events go through the inbox."""
        return self._suspect.keys() - self._owned if self._suspect else ()

    async def assigned(self, places: Collection[Place], events: int) -> None:
        """Own partitions, except those that another process left.

        Args:
            events: how many events it can have been processing when it crashed.
        """
        # What is handled alone is found at once.
        rows = await self._run(queries.OWN_FREE, places, crashes=int(events > 1))
        left = {(topic, partition): is_ours for topic, partition, is_ours in rows}
        for place, is_ours in sorted(left.items()):
            how = "if the next one does not either, " if is_ours else ""
            _LOG.info(
                "%s %d: its last owner did not end cleanly; %sup to %d events are handled one at a time",
                *place,
                how,
                events,
            )
        self._suspect |= dict.fromkeys(left, events)
        self._owned |= {place for place in places if left.get(place, True)}

    def passed(self, place: Place) -> bool:
        """Record that a new event of a partition did not crash the process.

        Returns:
            Whether it was the last one that can: own the partition now.
        """
        if place in self._suspect:
            self._suspect[place] -= 1
        return self._suspect.get(place) == 0

    async def own(self, place: Place) -> None:
        """Own a partition that is no longer suspect."""
        await self._run(queries.OWN, [place])
        self._owned.add(place)
        self._suspect.pop(place, None)

    async def give_up(self, places: Collection[Place]) -> None:
        """Remove this process's rows of partitions that move to another member."""
        # A mark stays.
        if ours := self._owned.intersection(places) - self._suspect.keys():
            await self._run(queries.DISOWN, ours)
        self._owned.difference_update(places)
        for place in places:
            self._suspect.pop(place, None)

    async def end(self) -> None:
        """Remove all rows of this process, if the database is available; a failure is only logged."""
        try:
            await self.give_up(self._owned)
        except Exception as error:  # noqa: BLE001 - by any driver
            _LOG.info("the next owner handles its first events one at a time: %s", type(error).__name__)

    async def _run(self, query: str, places: Collection[Place], **more: int) -> Rows:
        ordered = sorted(places)
        given: dict[str, Any] = {
            **self._same,
            "topics": [topic for topic, _ in ordered],
            "partitions": [partition for _, partition in ordered],
            **more,
        }
        async with self._database.transaction() as transaction:
            return await self._database.rows(transaction, query, given)
