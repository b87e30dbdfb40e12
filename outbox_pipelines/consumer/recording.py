"""Record events in the transaction of their handlers: a row for each event.

Invariants:
- An event whose key has an earlier event in the inbox is not recorded as handled.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from outbox_pipelines.consumer import consumer_queries as queries
from outbox_pipelines.consumer import inbox
from outbox_pipelines.consumer.attempts import Attempts, Item
from outbox_pipelines.consumer.inbox import Arrival, bucket


class BehindError(Exception):
    """Events of the transaction must wait for earlier ones in the inbox."""


class Recording(Attempts):
    """Records events; must be used by one thread or task."""

    async def _record(
        self, transaction: Any, items: Sequence[Item], given: Mapping[str, Any]
    ) -> tuple[Sequence[Item], Sequence[Item]]:
        """Record items.

        Returns:
            Those that are new, and those that have to wait for an earlier event of their key.

        Raises:
            BehindError: the transaction cannot be used, because of such an event.
        """
        [(count, began, ids)] = await self._database.rows(transaction, queries.RECORD_MANY, given)
        new: Sequence[Item] = items
        left: list[Item] = []
        if count < len(items):
            recorded = set(ids or ())
            # The first item of each id, at its own place: later ones of its key must not overtake it.
            first_ones = {each.id: each for each in reversed(items)}
            new = [each for each in items if each is first_ones[each.id] and each.id in recorded]
            others = [each.message_id for each in items if each.id not in recorded]
            known = {str(each) for each in await self._recorded(transaction, others)}
            if known and new:
                [(is_taken,)] = await self._database.rows(transaction, queries.TAKEN, given)
                if is_taken:
                    raise BehindError
            left = [each for each in items if each.id not in recorded and each.id not in known]
        if new:
            first = new[0]
            new = await self._marked(transaction, new)
            if new:
                self._began(first.id, str(began))
        return new, left

    def _given(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the parameters of RECORD_MANY and TAKEN."""
        contents = [inbox.text_of(each.content) for each in items]
        return {
            "ids": inbox.array([each.id for each in items]),
            "contents": inbox.array(contents) if any(contents) else None,
            "topics": inbox.array([each.event.topic for each in items if each.event]),
            "keys": inbox.array([inbox.key_of(each.event, each.id) for each in items if each.event]),
            "source": self._plan.source,
            "block": self._plan.blocks,
        }

    async def _receive(self, items: Sequence[Item], **more: Any) -> dict[uuid.UUID, int]:
        """Write items to the inbox; return where those are that are new."""
        arrivals = [
            Arrival.of(each.event, each.message_id, each.message, each.content)
            if each.event
            else Arrival.of_no_event(each.message_id, each.message)
            for each in items
        ]
        return await self._surely(lambda: self._inbox.receive(arrivals, **more))

    async def _contents(self, items: Sequence[Item]) -> dict[uuid.UUID, uuid.UUID]:
        ids = [each.message_id for each in items]
        async with self._database.transaction() as transaction:
            rows = await self._database.rows(transaction, queries.CONTENTS, self._which(ids))
        return {uuid.UUID(event_id): uuid.UUID(content) for event_id, content in rows}

    async def _recorded(self, transaction: Any, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Return the items that were already handled or received."""
        if not ids:
            return set()
        rows = await self._database.rows(transaction, queries.KNOWN, self._which(ids))
        return {uuid.UUID(text) for (text,) in rows}

    def _which(self, ids: Sequence[uuid.UUID]) -> dict[str, Any]:
        return {
            "ids": [str(each) for each in ids],
            "buckets": list({bucket(each) for each in ids}),
            "source": self._plan.source,
        }
