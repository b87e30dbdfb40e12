"""What the tests of parked events share: events written, events parked, events that arrived."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from outbox_pipelines.writer import emit
from tests.conftest import Message, Outbox, session


def write(outbox: Outbox, *events: tuple[str, Any]) -> list[str]:
    """One transaction with these (aggregate id, payload); their ids."""
    connection = session(outbox.settings.dsn)
    with connection.transaction():
        return [str(emit(connection, "order", key, "order.placed", payload).id) for key, payload in events]


def parked_rows(outbox: Outbox) -> list[tuple[Any, ...]]:
    return outbox.rows("SELECT aggregate_id, id::text, state, attempts FROM outbox_parked ORDER BY seq")


def keys(outbox: Outbox) -> list[str]:
    return [message.key for message in outbox.messages()]


def numbers(outbox: Outbox, key: str) -> list[int]:
    return numbers_by_key(outbox.messages())[key]


def numbers_by_key(messages: list[Message]) -> dict[str, list[int]]:
    """What arrived of each aggregate, in order; empty for one of which nothing did."""
    found: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        found[message.key].append(json.loads(message.value or "")["n"])
    return found
