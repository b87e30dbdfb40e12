"""The relays that a history can judge: one table.

Another way of relaying (exactly once, more shards, another source) is another entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.existing import textbook
from tests.history import broken, watched
from tests.history.record import Delivery
from tests.history.steps import Mode

# A short lease, so that a successor comes soon. What was refused is tried again soon; a dead letter, which is
# one after a few refusals, blocks its aggregate until it is replayed: so the order holds for all events.
_QUICK = {
    "OUTBOX_LEASE_SECONDS": "2",
    "OUTBOX_RETRY_SECONDS": "0.2",
    "OUTBOX_MAX_ATTEMPTS": "4",
    "OUTBOX_ON_DEAD_LETTER": "block",
    "OUTBOX_DEAD_LETTER_TOPICS": "true",
    # Also from which source events are read.
    "OUTBOX_LOG_LEVEL": "info",
}

_EXACTLY_ONCE = {"OUTBOX_DELIVERY": "exactly_once", "OUTBOX_TRANSACTION_SECONDS": "4"}
_TWO_SHARDS = """
INSERT INTO outbox_shards (shard, shards, done, system_identifier, database)
SELECT 1, 2, done, system_identifier, database FROM outbox_shards;
UPDATE outbox_shards SET shards = 2"""


@dataclass(frozen=True)
class Relay:
    """Programs that together are one relay; they find database, broker and topics in the environment."""

    programs: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    delivery: Delivery = "at_least_once"
    restarts: bool = False
    """Whether a program that ends on its own is started again, as a supervisor would."""
    prepare: str = ""
    """What it needs in the database in addition to the outbox, as SQL."""
    mode: Mode | None = None
    """Which durable steps it has; None for one that is not watched, since it is not ours."""
    has_shards: bool = False
    """Whether their number can change."""


_RELAY = watched.command("relay")
# As Dagster's sessions: the owner of the shard hands it over to the other one after so many seconds.
_SESSION = watched.command("hand-over", "5")

RELAYS: Mapping[str, Relay] = {
    "at_least_once": Relay((_RELAY, _SESSION), _QUICK, mode="at_least_once", has_shards=True),
    "exactly_once": Relay(
        (_RELAY, _SESSION),
        _QUICK | _EXACTLY_ONCE,
        delivery="exactly_once",
        mode="exactly_once",
        has_shards=True,
    ),
    "two_shards": Relay(
        (_RELAY, _RELAY, _SESSION), _QUICK, prepare=_TWO_SHARDS, mode="at_least_once", has_shards=True
    ),
    "table": Relay(
        (_RELAY, _SESSION),
        _QUICK | {"OUTBOX_CONFIG": str(Path(__file__).parent / "table.toml")},
        # The writers know our outbox alone: its rows are copied.
        prepare=f"{textbook.PUBLISHED_AT}; {textbook.COPY}",
        mode="table",
    ),
    **{
        # Two producers of one transactional id would fence each other all the time.
        f"broken.{name}": Relay(
            (broken.command(name),) * (1 if kind.delivery == "exactly_once" else 2),
            delivery=kind.delivery,
            restarts=kind.delivery == "exactly_once",
            prepare=kind.prepare,
        )
        for name, kind in broken.RELAYS.items()
    },
}
