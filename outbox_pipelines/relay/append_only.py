"""The kind of the append-only outbox: implements `kinds.Kind`, function by function."""

# What the commands do not need is imported where it is needed.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.settings import OutboxSettings, ProcessSettings, RelaySettings

if TYPE_CHECKING:
    from outbox_pipelines.relay.kafka.producer import IdempotentProducer
    from outbox_pipelines.relay.lease.shard import Shard
    from outbox_pipelines.relay.parking.dead_letter_store import ParkedDeadLetters
    from outbox_pipelines.relay.run import Run
    from outbox_pipelines.relay.shared import SharedBlockedAggregates
    from outbox_pipelines.relay.worker import Worker

has_days: Final = True
has_positions: Final = True
check = require_schema
measure = outbox_measurements.read
what_is_not_locked = outbox_measurements.read_what_is_not_locked


def shards(settings: OutboxSettings) -> list[int]:
    with connect(settings, name="outbox relay") as connection:
        try:
            found = [row[0] for row in connection.execute(relay_sql.SHARD_NUMBERS).fetchall()]
        except psycopg.errors.UndefinedTable:
            found = []
    # Why none is seen, the check of the first one's relay says.
    return found or [0]


def own(settings: RelaySettings, shard: int | None, owner: str) -> Shard:
    from outbox_pipelines.relay.lease.shard import Shard

    return Shard(settings, shard, owner)


def make_worker(
    settings: ProcessSettings,
    ownership: Shard,
    producer: IdempotentProducer,
    blocked: SharedBlockedAggregates,
    run: Run,
) -> Worker:
    from outbox_pipelines.relay.worker import make_worker

    return make_worker(settings, ownership, producer, blocked, run)


def fleet_name(settings: OutboxSettings) -> str:
    return "outbox_shards"


def lock_of_all(settings: OutboxSettings, connection: Connection) -> int | None:
    return None


def dead_letters(settings: OutboxSettings) -> ParkedDeadLetters:
    from outbox_pipelines.relay.parking.dead_letter_store import ParkedDeadLetters

    return ParkedDeadLetters(settings)
