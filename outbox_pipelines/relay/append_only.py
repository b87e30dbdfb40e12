"""The kind of the append-only outbox: implements `kinds.Kind`, function by function."""

# What the commands do not need is imported where it is needed.

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality import measurements, rules
from outbox_pipelines.quality import status as rendering
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.kinds import Status
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.quality.measured import Measurements
    from outbox_pipelines.relay.kafka.producer import IdempotentProducer
    from outbox_pipelines.relay.parking.dead_letters import Filter, Found, Replayed
    from outbox_pipelines.relay.run import Run
    from outbox_pipelines.relay.shard import Shard
    from outbox_pipelines.relay.shared import SharedBlockedAggregates
    from outbox_pipelines.relay.worker import Worker

has_days: Final = True
has_positions: Final = True
check = require_schema


def shards(settings: Settings) -> list[int]:
    with connect(settings, name="outbox relay") as connection:
        try:
            found = [row[0] for row in connection.execute(queries.SHARD_NUMBERS).fetchall()]
        except psycopg.errors.UndefinedTable:
            found = []
    # Why none is seen, the check of the first one's relay says.
    return found or [0]


def own(settings: Settings, shard: int | None, owner: str) -> Shard:
    from outbox_pipelines.relay.shard import Shard

    return Shard(settings, shard, owner)


def make_worker(
    settings: Settings,
    place: Shard,
    producer: IdempotentProducer,
    blocked: SharedBlockedAggregates,
    run: Run,
) -> Worker:
    from outbox_pipelines.relay import publishing

    return publishing.make_worker(settings, place, producer, blocked, run)


def measure(settings: Settings) -> Measurements:
    return measurements.read(settings)


def what_is_not_locked(settings: Settings) -> dict[str, Any]:
    return measurements.read_what_is_not_locked(settings)


def status(settings: Settings) -> Status:
    found = measurements.read(settings)
    results = rules.judge(settings, found)
    return Status(found, results, lambda: rendering.render(found, results))


def fleet_name(settings: Settings) -> str:
    return "outbox_shards"


def lock_of_all(settings: Settings, connection: Connection) -> int | None:
    return None


class _DeadLetters:
    """Those in the table `outbox_parked`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def find(self, given: Mapping[str, Any], *, limit: int, discarded: bool) -> Found:
        from outbox_pipelines.relay.parking import dead_letters

        return dead_letters.find(self._settings, _filter(given), limit=limit, discarded=discarded)

    def show(self, given: str) -> list[dict[str, Any]]:
        from outbox_pipelines.relay.parking import dead_letters

        return dead_letters.show(self._settings, _id(given))

    def act(self, action: Any, given: Mapping[str, Any], *, actor: str, reason: str) -> int:
        from outbox_pipelines.relay.parking import dead_letters

        return dead_letters.act(self._settings, action, _filter(given), actor=actor, reason=reason)

    def replay(self, given: Mapping[str, Any], *, actor: str, reason: str, seconds: float) -> Replayed:
        from outbox_pipelines.relay.parking import dead_letters

        which = _filter(given)
        return dead_letters.replay(self._settings, which, actor=actor, reason=reason, seconds=seconds)


def _filter(given: Mapping[str, Any]) -> Filter:
    from outbox_pipelines.relay.parking.dead_letters import Filter

    return Filter(**{**given, "ids": tuple(map(_id, given.get("ids", ())))})


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise SetupError(f"{text!r} is not a valid UUID: use the ids that `list` shows") from None


dead_letters = _DeadLetters
