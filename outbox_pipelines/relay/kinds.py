"""The differences between the append-only outbox and a marked table; `of` chooses between them.

Invariants:
- A kind is a module that is imported by its name when it is asked for: nothing imports a wing, and a command
  that only reads imports no client of Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from outbox_pipelines.database import Connection
    from outbox_pipelines.quality.measurements import Measurements
    from outbox_pipelines.relay.kafka.producer import IdempotentProducer
    from outbox_pipelines.relay.lease.owner_session import Ownership
    from outbox_pipelines.relay.parking.dead_letter_store import Replayed
    from outbox_pipelines.relay.run import Run, Totals
    from outbox_pipelines.relay.shared import SharedBlockedAggregates
    from outbox_pipelines.settings import ProcessSettings

_APPEND_ONLY: Final = "outbox_pipelines.relay.append_only"
_EXISTING_TABLE: Final = "outbox_pipelines.existing.kind"


class Worker(Protocol):
    """Relays a shard until it is stopped."""

    totals: Totals

    def run(self) -> Totals:
        """Relay; return what was relayed.

        Raises:
            ShardLostError: another relay has taken over, or the connection to the database is lost.
            UnavailableError: with `until_empty`, Kafka has been unavailable for too long.
        """


class Store(Protocol):
    """Dead letters of a relay or of consumers."""

    def find(self, given: Mapping[str, Any], *, limit: int, discarded: bool) -> Any:
        """Return the dead letters that meet all given conditions, with `total`, `by_error` and `rows`.

        Args:
            limit: maximum number of rows; the counts cover all.
            discarded: return discarded ones instead.
        """

    def show(self, given: Any) -> list[dict[str, Any]]:
        """Return everything known about the dead letters with this id."""

    def check_action(self, action: Any, given: Mapping[str, Any]) -> None:
        """Raise what `act` would raise for these conditions, before the dead letters are counted."""

    def act(self, action: Any, given: Mapping[str, Any], *, actor: str, reason: str) -> int:
        """Replay or discard the dead letters that meet the conditions; return their number.

        Args:
            actor: on whose behalf, for the audit, which also records the database role.
            reason: why, for the audit.

        Raises:
            SetupError: the reason is empty, the role lacks the right, or the action is not supported.
        """


class DeadLetters(Store, Protocol):
    """Dead letters of a relay. Ids are text."""

    def replay(self, given: Mapping[str, Any], *, actor: str, reason: str, seconds: float) -> Replayed:
        """Replay like `act`, and wait up to `seconds` until a relay has tried each dead letter."""


class Kind(Protocol):
    """Functions that depend on the table that is relayed. All raise `SetupError` for a missing setup."""

    has_days: bool
    """Whether its rows are kept in days, which are closed, archived and dropped."""
    has_positions: bool
    """Whether shards' positions say what is published. If not, its rows do, and relays record no progress."""

    def check(self, settings: ProcessSettings) -> None:
        """Check what a relay needs before it waits for anything."""

    def shards(self, settings: ProcessSettings) -> list[int]:
        """Return the numbers of the shards."""

    def own(self, settings: ProcessSettings, shard: int | None, owner: str) -> Ownership:
        """Return the right to relay a shard, which is not taken yet; None: the first free one."""

    def make_worker(
        self,
        settings: ProcessSettings,
        ownership: Any,
        producer: IdempotentProducer,
        blocked: SharedBlockedAggregates,
        run: Run,
    ) -> Worker:
        """Return a worker for the result of `own`, after the shard is taken."""

    def measure(self, settings: ProcessSettings) -> Measurements:
        """Return the measurements for the status, checks, alerts and metrics."""

    def what_is_not_locked(self, settings: ProcessSettings) -> dict[str, Any]:
        """Return the figures that no lock of another session conceals."""

    def dead_letters(self, settings: ProcessSettings) -> DeadLetters:
        """Return its dead letters."""

    def fleet_name(self, settings: ProcessSettings) -> str:
        """Return the name of the lock of its standby processes."""

    def lock_of_all(self, settings: ProcessSettings, connection: Connection) -> int | None:
        """Return the key of the lock that the owner of the whole table has; None: each shard has its own."""


def of(settings: ProcessSettings) -> Kind:
    """Return the kind of what the settings name."""
    name = _APPEND_ONLY if not settings.table else _EXISTING_TABLE
    return cast(Kind, import_module(name))
