"""Relays and their producers have numbers, and any of them could have any other's: such states are one."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from typing import Any

from tests.model.explore import Key
from tests.model.relay.database import Database
from tests.model.relay.kafka import Kafka


def relays_key(
    slots: Sequence[Any],
    identities: Sequence[int],
    database: Database,
    kafka: Kafka,
    of_slot: Callable[[int], Key] = lambda n: None,
) -> tuple[Key, Key]:
    """Return what has to do with relays and producers, in an order that does not depend on their numbers.

    Args:
        slots: relays, or None.
        identities: of what runs in each slot now, or next.
        of_slot: what else there is of a slot.
    """
    relays = [
        (
            None if process is None else (process.key(), kafka.key_of(process.producer.number)),
            identities[n] == database.identity,
            database.owner == n,
            of_slot(n),
        )
        for n, process in enumerate(slots)
    ]
    used = {process.producer.number for process in slots if process is not None}
    left = [
        kafka.key_of(number)
        for number, connection in enumerate(kafka.connections)
        if number not in used and (connection.is_open or connection.in_flight)
    ]
    return _sorted(relays), _sorted(left)


def _sorted(keys: list[Key]) -> Key:
    # A key has values of different types.
    return tuple(sorted(keys, key=lambda key: marshal.dumps(key, 2)) if len(keys) > 1 else keys)
