"""The owner name of a run, by which the supervisor distinguishes its own sessions from other relays."""

from __future__ import annotations

_DAGSTER = "dagster run "


def owner_of(run_id: str, place: str) -> str:
    """Return the owner's name for a run, with the run id as short as on Dagster's pages."""
    return f"{_run(run_id)} on {place}"


def is_session(owner: str) -> bool:
    """Return whether the shard's owner is a Dagster run."""
    return owner.startswith(_DAGSTER)


def is_run(owner: str | None, run_id: str) -> bool:
    """Return whether this run owns the shard."""
    return owner is not None and owner.startswith(f"{_run(run_id)} ")


def _run(run_id: str) -> str:
    return f"{_DAGSTER}{run_id[:8]}"
