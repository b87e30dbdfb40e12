"""The kind of an existing table: implements `relay.kinds.Kind`, function by function."""

# What the commands do not need is imported where it is needed.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.database import Connection
from outbox_pipelines.existing import examine, table_measurements
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.dead_letter_rows import DeadLetterRows
from outbox_pipelines.existing.table_ownership import TableOwnership, holding
from outbox_pipelines.relay import adoption
from outbox_pipelines.settings import OutboxSettings, ProcessSettings, RelaySettings

if TYPE_CHECKING:
    from outbox_pipelines.existing.table_worker import MarkedTableWorker
    from outbox_pipelines.relay.kafka.producer import IdempotentProducer
    from outbox_pipelines.relay.run import Run
    from outbox_pipelines.relay.shared import SharedBlockedAggregates


has_days: Final = False
has_positions: Final = False
measure = table_measurements.read
dead_letters = DeadLetterRows


def check(settings: OutboxSettings) -> None:
    """Leave it to the session that owns the table: a mapping is compared with what that session sees."""


def shards(settings: OutboxSettings) -> list[int]:
    return [0]


def own(settings: RelaySettings, shard: int | None, owner: str) -> TableOwnership:
    return TableOwnership(settings, owner)


def make_worker(
    settings: ProcessSettings,
    ownership: TableOwnership,
    producer: IdempotentProducer,
    blocked: SharedBlockedAggregates,
    run: Run,
) -> MarkedTableWorker:
    from outbox_pipelines.existing.table_worker import MarkedTableWorker

    return MarkedTableWorker(settings, ownership, producer, blocked, run)


def what_is_not_locked(settings: OutboxSettings) -> dict[str, Any]:
    return {}


def fleet_name(settings: OutboxSettings) -> str:
    return str(open_mapping(settings))


def lock_of_all(settings: OutboxSettings, connection: Connection) -> int:
    mapping = adoption.followed(connection, open_mapping(settings))
    return holding(examine.check(connection, mapping).oid)
