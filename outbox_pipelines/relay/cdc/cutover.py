"""`outbox cutover`: changes where relays read events, and watches until they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from outbox_pipelines.database import connect
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.setup import remove, set_up
from outbox_pipelines.relay.cdc.status import read
from outbox_pipelines.settings import Settings

_POLL: Final = 0.1


def plan(settings: Settings, target: str) -> list[str]:
    """Return what `run` would do."""
    found = read(settings)
    if found.source == target:
        return [f"nothing to do: relays read by {target} already"]
    if target == "polling":
        return [
            "1. the relay stops reading the slot, and continues between snapshots at the same position",
            f"2. the slot {found.slot} is dropped",
        ]
    return [
        "1. the publication is made if it is missing",
        "2. a slot is made, when all transactions that run now have ended; relays publish as before",
        "3. a relay that has published everything that is older than the slot continues from the slot",
    ]


def run(settings: Settings, target: str, *, seconds: float, say: Callable[[str], None]) -> None:
    """Change the source, and wait until the relay uses it.

    Raises:
        SetupError: the database is not set up for it; nothing has changed.
        NotReadyError: it took too long; relays publish as before, or from the new source later.
    """
    if target == "polling":
        remove(settings, seconds=seconds, say=say)
        say("relays read between snapshots")
        return
    if set_up(settings, seconds=seconds, say=say) is None:
        say("the slot exists already")
    deadline = time.monotonic() + seconds
    with closing(connect(settings, name="outbox cutover")) as connection:
        while time.monotonic() < deadline:
            row = connection.execute(queries.IS_READ).fetchone()
            if row is None or not row[1]:
                say("no relay runs: the next one continues from the slot")
                return
            if row[0]:
                say("the relay reads from the slot")
                return
            time.sleep(_POLL)
    say("the relay still publishes what the slot does not deliver; it will read from the slot afterwards")
