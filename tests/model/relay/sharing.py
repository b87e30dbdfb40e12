"""Immutable objects of a world are shared by all its states: a state that is packed names them by number."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Hashable
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.outcomes import Dead, Suspect, Waiting

_shared: list[Any] = []
_numbers: dict[Hashable, int] = {}


def _of(number: int) -> Any:
    return _shared[number]


def _itself(one: Hashable) -> Hashable:
    return type(one), one


def _batch(batch: Batch) -> Hashable:
    return (
        tuple(batch.events),
        batch.done,
        batch.target,
        batch.ends_tick,
        batch.starts_tick,
        tuple(batch.suspects),
        tuple(batch.unreadable),
    )


def _share(kind: type, key: Callable[[Any], Hashable]) -> None:
    def packed(one: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        number = _numbers.setdefault(key(one), len(_shared))
        if number == len(_shared):
            _shared.append(one)
        return _of, (number,)

    copyreg.pickle(kind, packed)


def share() -> None:
    """From here on such objects are packed by number; valid within this process."""
    for kind in (Event, Position, Snapshot, Dead, Suspect, Waiting):
        _share(kind, _itself)
    _share(Batch, _batch)
