"""The durable steps of a relay: whatever stays done when the process dies right after it. One table.

Invariants:
- A step is a committed statement or transaction that changed a row, or an answer of Kafka's after which
  something is stored there. Statements of one transaction are one step.
- A writing statement that this table does not know is a step of its own, "unknown: …": a test fails on it, as
  it does on a step that never occurs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from outbox_pipelines.days.partitions import partitions_sql
from outbox_pipelines.existing import existing_sql as claim_queries
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.parking import parking_sql

Mode = Literal["at_least_once", "exactly_once", "table"]
MODES: Final[tuple[Mode, ...]] = ("at_least_once", "exactly_once", "table")
_OURS: Final[tuple[Mode, ...]] = ("at_least_once", "exactly_once")
_ONCE: Final[tuple[Mode, ...]] = ("exactly_once",)
_TABLE: Final[tuple[Mode, ...]] = ("table",)


@dataclass(frozen=True)
class Step:
    """One durable step: where it occurs, and in the database which statements it is."""

    modes: tuple[Mode, ...]
    statements: tuple[str, ...] = ()
    command: bool = False
    """Whether it is a step of an operator's command instead of a relay."""
    rare: bool = False
    """Whether it takes an outage of a length that only soaks have."""


# The order is that of a relay's life.
STEPS: Final[Mapping[str, Step]] = {
    "take the shard": Step(_OURS, (relay_sql.TAKE,)),
    "create the progress topic": Step(_ONCE),
    "fence predecessors": Step(_ONCE),
    "clear the tried marks": Step(_OURS, (parking_sql.WAS_TRYING,)),
    "isolate a released run": Step(_OURS, (parking_sql.ALONE,)),
    "mark a suspect": Step(_OURS, (relay_sql.CRASH_GUARD,)),
    "clear the crash state": Step(_OURS, (relay_sql.CALM,)),
    # With the id of a new tick; a plain settle has none.
    "open a tick": Step(_ONCE),
    "acknowledge": Step(MODES),
    "park ahead": Step(_ONCE, (parking_sql.PARK,)),
    "commit": Step(_ONCE),
    "abort": Step(_ONCE),
    "settle": Step(_OURS, (relay_sql.SETTLE, relay_sql.SETTLE_WITH_PROGRESS)),
    "settle and park": Step(("at_least_once",)),
    "mark as tried": Step(_OURS, (parking_sql.TRYING,)),
    "clear a tried mark": Step(_OURS, (parking_sql.INNOCENT,)),
    "acknowledge a probe": Step(("at_least_once", "table")),
    "abort a probe": Step(_ONCE),
    "copy a dead letter": Step(MODES),
    "record acceptance": Step(_ONCE, (parking_sql.ACCEPTED,)),
    "record a refusal": Step(MODES, (parking_sql.REFUSED, claim_queries.REFUSED)),
    "record an outage": Step(MODES, (parking_sql.POSTPONED, claim_queries.POSTPONED), rare=True),
    "remove released": Step(_OURS, (parking_sql.RELEASED,)),
    "suspect released": Step(_OURS, (parking_sql.SUSPECTED,)),
    "show the breaker": Step(_OURS, (relay_sql.BREAKER,)),
    "mark": Step(_TABLE, (claim_queries.MARK,)),
    "reach the pause": Step(_OURS, (relay_sql.PAUSED,)),
    "reach the barrier": Step(_OURS, (relay_sql.REACHED,)),
    "forget the tick": Step(("at_least_once",), (relay_sql.FORGET_TICK,)),
    "give the shard back": Step(_OURS, (relay_sql.RELEASE,)),
    "release the lock": Step(MODES, (relay_sql.UNLOCK, claim_queries.UNLOCK)),
    # A function that does the next step of a change, and is called until there is none.
    "change the shards": Step(_OURS, (relay_sql.CHANGE_SHARDS,), command=True),
}
# Write, and are part of another step or change nothing that a relay relies on.
_QUIET: Final = (
    relay_sql.HEARTBEAT,
    relay_sql.UNWANT_FORGOTTEN,
    partitions_sql.ENSURE,
)

When = Literal["before", "after", "lost"]
WHENS: Final[tuple[When, ...]] = ("before", "after", "lost")
# Kafka's report and the end of a command's connection are not calls whose answer could be lost.
_NO_ANSWER: Final = ("acknowledge", "acknowledge a probe", "copy a dead letter", "release the lock")


def of(mode: Mode, *, command: bool = False) -> list[str]:
    """The steps of one mode."""
    return [name for name, step in STEPS.items() if mode in step.modes and step.command is command]


def faults(mode: Mode, *, command: bool = False) -> list[tuple[str, When]]:
    """Every step of a mode with every way to die at it, or to lose its answer."""
    return [
        (name, when)
        for name in of(mode, command=command)
        for when in WHENS
        if when != "lost" or name not in _NO_ANSWER
    ]


_NAMES: Final[Mapping[str, str]] = {
    statement: name for name, step in STEPS.items() for statement in step.statements
}


def name_of(statement: str, parameters: Any) -> str | None:
    """The step of a statement, or of the template that it was made from; None where it is none."""
    name = _NAMES.get(statement)
    if name == "settle" and parameters.get("tick") is not None:
        return "open a tick"
    return name


def is_quiet(statement: str) -> bool:
    """Whether it writes and is no step."""
    return statement in _QUIET


def of_transaction(names: Iterable[str]) -> list[str]:
    """The steps that a transaction is, from those of its statements."""
    found = list(dict.fromkeys(names))
    if "settle" in found and "park ahead" in found:
        found = [name for name in found if name not in ("settle", "park ahead")] + ["settle and park"]
    return found
