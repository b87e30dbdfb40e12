"""The relays that a history can judge: one table.

Another way of relaying (exactly once, more shards, another source) is another entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import command
from tests.history import broken
from tests.history.record import Delivery
from tests.relay.claims import textbook

# A short lease, so that a successor comes soon; small pieces, so that faults meet unfinished ticks.
_QUICK = {"OUTBOX_LEASE_SECONDS": "2", "OUTBOX_PIECE_EVENTS": "5"}


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
    """Whether a program that ends by itself is started again, as a supervisor would."""
    prepare: str = ""
    """What it needs in the database besides the outbox, as SQL."""


RELAYS: Mapping[str, Relay] = {
    "at_least_once": Relay((tuple(command("relay")),) * 2, _QUICK),
    "exactly_once": Relay((tuple(command("relay")),) * 2, _QUICK | _EXACTLY_ONCE, delivery="exactly_once"),
    "two_shards": Relay((tuple(command("relay")),) * 3, _QUICK, prepare=_TWO_SHARDS),
    "table": Relay(
        (tuple(command("relay")),) * 2,
        _QUICK | {"OUTBOX_TABLE": str(Path(__file__).parent / "table.toml")},
        # The writers know our outbox alone: its rows are copied.
        prepare=f"{textbook.PUBLISHED_AT}; {textbook.COPY}",
    ),
    **{
        f"broken.{name}": Relay((broken.command(name),) * 2, prepare=kind.prepare)
        for name, kind in broken.RELAYS.items()
    },
}
