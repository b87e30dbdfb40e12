"""The records of handled and received events: `processed_events`, and the service's own table.

Invariants:
- An event whose key has an earlier event in the inbox is not recorded as handled.
- If no item of a transaction is new, no handler follows, and the transaction can be committed.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer import dedupe_table
from outbox_pipelines.consumer.administration import require_version
from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.consumer_database import Database, Statement
from outbox_pipelines.consumer.dedupe_table import Marks
from outbox_pipelines.consumer.event_reading import Event
from outbox_pipelines.consumer.inbox import array, key_of, text_of
from outbox_pipelines.consumer.items import Item
from outbox_pipelines.errors import SetupError

# The ring of partitions has so many days; the same as in sql/consumer.
_RING: Final = 64
_DAY_MS: Final = 86_400_000


class BehindError(Exception):
    """Events of the transaction must wait for earlier ones in the inbox."""


class ProcessedEvents:
    """The records of one source; must be used by one thread or task."""

    def __init__(self, plan: Plan, database: Database) -> None:
        self._database = database
        self._dedupe_table = plan.dedupe_table
        self._same = {"source": plan.source, "block": plan.blocks}
        self._marks: Marks | None = None

    async def check(self) -> None:
        """Check the consumer's tables, and the service's own one.

        Raises:
            SetupError: they do not exist, or cannot be used.
        """
        async with self._database.transaction() as transaction:
            [(there,)] = await self._database.rows(transaction, queries.TABLES, {})
            foreign = [] if there else await self._database.rows(transaction, queries.FOREIGN, {})
            made = await self._database.rows(transaction, queries.VERSIONS, {}) if there else []
        if foreign and foreign[0][0]:
            raise SetupError(
                "the search_path leads to a table processed_events or inbox that is not the consumer's: "
                "create the consumer's tables in another schema (OUTBOX_CONSUMER_SCHEMA=… outbox consumer "
                "migrate), and put that schema first in the search_path"
            )
        if not there:
            raise SetupError(
                "the consumer's tables do not exist: run `outbox consumer migrate` or migrate(connection)"
            )
        require_version(dict(made))
        if self._dedupe_table is not None:
            self._marks = await dedupe_table.load(
                self._database, self._dedupe_table, str(self._same["source"])
            )

    def mark(self, event: Event) -> tuple[str, str]:
        """Return an event's row in the service's own table, or raise `UnreadableError`."""
        return ("", "") if self._marks is None else self._marks.mark(event)

    async def record(self, transaction: Any, item: Item) -> str | None:
        """Record an item that is new and whose key is free; return when the transaction began, or None."""
        rows = await self._database.rows(transaction, *self.statement(item))
        return str(rows[0][0]) if rows and await self.write_marks(transaction, [item]) else None

    def statement(self, item: Item) -> Statement:
        """Return what records an item, the first statement of its transaction."""
        assert item.event is not None
        given = {
            **self._same,
            **_record(item),
            "topic": item.event.topic,
            "key": key_of(item.event, item.id),
        }
        return queries.RECORD, given

    async def record_many(
        self, transaction: Any, items: Sequence[Item]
    ) -> tuple[Sequence[Item], Sequence[Item], tuple[str, str]]:
        """Record items.

        Returns:
            Those that are new, those that have to wait for an earlier event of their key, and the id of a
            record with the time when the transaction began.

        Raises:
            BehindError: the transaction cannot be used, because of such an event.
        """
        contents = [text_of(item.content) for item in items]
        parameters = {
            **self._same,
            "ids": array([item.id for item in items]),
            "contents": array(contents) if any(contents) else None,
            "topics": array([item.event.topic for item in items if item.event]),
            "keys": array([key_of(item.event, item.id) for item in items if item.event]),
        }
        [(count, began, ids)] = await self._database.rows(transaction, queries.RECORD_MANY, parameters)
        new: Sequence[Item] = items
        left: list[Item] = []
        if count < len(items):
            recorded = set(ids or ())
            # The first item of each id, at its own place: later ones of its key must not overtake it.
            first_ones = {item.id: item for item in reversed(items)}
            new = [item for item in items if item is first_ones[item.id] and item.id in recorded]
            others = [item.message_id for item in items if item.id not in recorded]
            known = {str(event_id) for event_id in await self.known(transaction, others)}
            if known and new:
                [(is_taken,)] = await self._database.rows(transaction, queries.TAKEN, parameters)
                if is_taken:
                    raise BehindError
            left = [item for item in items if item.id not in recorded and item.id not in known]
        first = new[0].id if new else ""
        return await self.write_marks(transaction, new) if new else [], left, (first, str(began))

    async def is_duplicate(self, transaction: Any, item: Item) -> bool:
        """Record the id that a message of the inbox has now; return whether the event was recorded under it.

        An event with the id of a different event is not: the operator who replays it has decided so.
        """
        given = {**self._same, **_record(item)}
        if await self._database.rows(transaction, queries.RECORD_ID, given):
            return False
        return any(same for (same,) in await self._database.rows(transaction, queries.IS_SAME, given))

    async def write_marks(self, transaction: Any, items: Sequence[Item]) -> Sequence[Item]:
        """Write items to the service's own table; return those that were not there."""
        marked = [each.mark for each in items if each.mark[0]]
        if self._marks is None or not marked:
            return items
        new = await self._marks.write(self._database, transaction, marked)
        # The first item of each value.
        first = {each.mark[0]: each for each in reversed(items) if each.mark[0] in new}
        unmarked = [each for each in items if not each.mark[0] or first.get(each.mark[0]) is each]
        if not unmarked:
            await self._database.rows(transaction, queries.END_HANDLING, {})
        return unmarked

    async def known(self, transaction: Any, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Return the ids that were already handled or received."""
        if not ids:
            return set()
        rows = await self._database.rows(transaction, queries.KNOWN, self._which(ids))
        return {uuid.UUID(text) for (text,) in rows}

    async def confirm(self, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Return the same, in a transaction of its own."""
        async with self._database.transaction() as transaction:
            return await self.known(transaction, ids)

    async def contents(self, ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, uuid.UUID]:
        """Return the digests of the contents that were recorded with these ids."""
        async with self._database.transaction() as transaction:
            rows = await self._database.rows(transaction, queries.CONTENTS, self._which(ids))
        return {uuid.UUID(event_id): uuid.UUID(content) for event_id, content in rows}

    def _which(self, ids: Sequence[uuid.UUID]) -> dict[str, Any]:
        texts = [str(each) for each in ids]
        return {**self._same, "ids": texts, "buckets": list({bucket(each) for each in texts})}


def _record(item: Item) -> dict[str, Any]:
    content = None if item.content is None else str(item.content)
    return {"id": item.id, "bucket": bucket(item.id), "content": content}


def bucket(event_id: uuid.UUID | str) -> int:
    """Return the bucket, like `processed_bucket` in sql/consumer.

    Args:
        event_id: as a UUID, or as str() writes one.
    """
    text = str(event_id)
    is_dated = text[14] == "7" and text[19] in "89ab"
    return int(text[:8] + text[9:13], 16) // _DAY_MS % _RING if is_dated else -1
