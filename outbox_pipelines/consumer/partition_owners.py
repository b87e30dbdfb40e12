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
from outbox_pipelines.consumer.kafka_messages import Partition

_LOG: Final = logging.getLogger(__name__)


class CrashGuard:
    """The partitions of one run of a consumer; must be used by one thread or task."""

    def __init__(self, database: Database, source: str, group: str) -> None:
        self._database = database
        self._same = {"source": source, "group": group, "owner": str(uuid.uuid4())}
        self._owned: set[Partition] = set()
        # How many more events of a partition can crash the process; through the inbox if it is not owned.
        self._suspect: dict[Partition, int] = {}

    @property
    def is_unsure(self) -> bool:
        """Whether there are partitions of which it has to know what has `passed`."""
        return bool(self._suspect)

    @property
    def suspects(self) -> Collection[Partition]:
        """Partitions whose events go through the inbox."""
        return self._suspect.keys() - self._owned if self._suspect else ()

    async def assigned(self, partitions: Collection[Partition], events: int) -> None:
        """Own partitions, except those that another process left.

        Args:
            events: how many events it can have been processing when it crashed.
        """
        # What is handled alone is found at once.
        rows = await self._run(queries.OWN_FREE, partitions, crashes=int(events > 1))
        left = {(topic, number): is_ours for topic, number, is_ours in rows}
        for partition, is_ours in sorted(left.items()):
            how = "if the next one does not either, " if is_ours else ""
            _LOG.info(
                "%s %d: its last owner did not end cleanly; %sup to %d events are handled one at a time",
                *partition,
                how,
                events,
            )
        self._suspect |= dict.fromkeys(left, events)
        self._owned |= {partition for partition in partitions if left.get(partition, True)}

    def passed(self, partition: Partition) -> bool:
        """Record that a new event of a partition did not crash the process.

        Returns:
            Whether it was the last one that can: own the partition now.
        """
        if partition in self._suspect:
            self._suspect[partition] -= 1
        return self._suspect.get(partition) == 0

    async def own(self, partition: Partition) -> None:
        """Own a partition that is no longer suspect."""
        await self._run(queries.OWN, [partition])
        self._owned.add(partition)
        self._suspect.pop(partition, None)

    async def give_up(self, partitions: Collection[Partition]) -> None:
        """Remove this process's rows of partitions that move to another member."""
        # A mark stays.
        if ours := self._owned.intersection(partitions) - self._suspect.keys():
            await self._run(queries.DISOWN, ours)
        self._owned.difference_update(partitions)
        for partition in partitions:
            self._suspect.pop(partition, None)

    async def end(self) -> None:
        """Remove all rows of this process, if the database is available; a failure is only logged."""
        try:
            await self.give_up(self._owned)
        except Exception as error:  # noqa: BLE001 - by any driver
            _LOG.info("the next owner handles its first events one at a time: %s", type(error).__name__)

    async def _run(self, query: str, partitions: Collection[Partition], **more: int) -> Rows:
        ordered = sorted(partitions)
        given: dict[str, Any] = {
            **self._same,
            "topics": [topic for topic, _ in ordered],
            "partitions": [number for _, number in ordered],
            **more,
        }
        async with self._database.transaction() as transaction:
            return await self._database.rows(transaction, query, given)
