"""The name under which a run holds a shard: how the supervisor knows its own sessions from other relays."""

from __future__ import annotations

_DAGSTER = "dagster run "


def owner_of(run_id: str, place: str) -> str:
    """The owner's name for a run; the id as short as Dagster's pages show it."""
    return f"{_run(run_id)} on {place}"


def is_session(owner: str) -> bool:
    """Whether a run of Dagster's holds the shard."""
    return owner.startswith(_DAGSTER)


def is_run(owner: str | None, run_id: str) -> bool:
    """Whether this run holds the shard."""
    return owner is not None and owner.startswith(f"{_run(run_id)} ")


def _run(run_id: str) -> str:
    return f"{_DAGSTER}{run_id[:8]}"
