"""The outboxes of this package's own code location: the environment's, or those of `outbox.toml`."""

from __future__ import annotations

import os

from outbox_pipelines.config.file import config_path
from outbox_pipelines.config.types import OUTBOX_NAME
from outbox_pipelines.defs.outbox import ONLY, Outbox
from outbox_pipelines.errors import SetupError


def served() -> list[Outbox]:
    """Return the outboxes. One that cannot be loaded reports why, and the others are served."""
    try:
        if config_path() is None:
            return [_only(os.environ.get("OUTBOX_NAME") or ONLY)]
        from outbox_pipelines.outboxes import load_outboxes

        found = load_outboxes()
    except SetupError as error:
        return [Outbox(automation="running", error=str(error))]
    # A name that cannot be one in Dagster has no place to be shown.
    return [Outbox(name=name, automation="running") for name in found.names if OUTBOX_NAME.fullmatch(name)]


def _only(name: str) -> Outbox:
    if OUTBOX_NAME.fullmatch(name):
        return Outbox(name=name, automation="running")
    return Outbox(automation="running", error=f"OUTBOX_NAME={name} cannot be a name: see docs/outboxes.md")
