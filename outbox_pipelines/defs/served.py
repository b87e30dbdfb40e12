"""The outboxes of this package's own code location: the environment's, or those of OUTBOX_OUTBOXES_FILE."""

from __future__ import annotations

import os

from outbox_pipelines.config.outboxes_file import NAME
from outbox_pipelines.defs.outbox import ONLY, Outbox
from outbox_pipelines.defs.sources import FILE
from outbox_pipelines.errors import SetupError


def served() -> list[Outbox]:
    """Return the outboxes. One that cannot be loaded reports why, and the others are served."""
    if not os.environ.get(FILE):
        name = os.environ.get("OUTBOX_NAME") or ONLY
        if NAME.fullmatch(name):
            return [Outbox(name=name, automation="running")]
        return [
            Outbox(automation="running", error=f"OUTBOX_NAME={name} cannot be a name: see docs/outboxes.md")
        ]
    from outbox_pipelines.outboxes import load_outboxes

    try:
        found = load_outboxes()
    except SetupError as error:
        return [Outbox(automation="running", error=str(error))]
    # A name that cannot be one in Dagster has no place to be shown.
    return [Outbox(name=name, automation="running") for name in found.names if NAME.fullmatch(name)]
