"""`outbox cutover`: shows where the relay reads events, changes it, and watches until it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from outbox_pipelines.database import connect
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.quality import quality_sql
from outbox_pipelines.quality.outbox_measurements import slots
from outbox_pipelines.quality.slots import Slots
from outbox_pipelines.relay.read.slot import slot_sql
from outbox_pipelines.relay.read.slot.slot_setup import remove, require_slots, set_up
from outbox_pipelines.settings import OutboxSettings

_POLL: Final = 0.1


def plan(settings: OutboxSettings, target: str) -> list[str]:
    """Return what `run` would do.

    Raises:
        SetupError: something is missing.
    """
    found = read(settings)
    if found.source == target:
        return [f"nothing to do: events are published by {target} already"]
    if target == "cdc":
        require_slots(settings)
        steps = [
            "the publication is made if it is missing",
            "a slot is made, when all transactions that run now have ended; relays publish as before",
            "a relay that has published everything that is older than the slot continues from the slot",
        ]
    else:
        steps = [
            "the relay stops reading the slot, and continues between snapshots at the same position",
            f"the slot {found.slot} is {'left' if found.foreign else 'dropped'}",
        ]
    return [f"{number}. {step}" for number, step in enumerate(steps, 1)]


def run(settings: OutboxSettings, target: str, *, seconds: float, say: Callable[[str], None]) -> None:
    """Change where the relay reads events, and wait until it does.

    Args:
        target: cdc or polling.
        seconds: how long each step may wait, at most.

    Raises:
        SetupError: something is missing; nothing has changed.
        NotReadyError: it took too long; events are published as before, or by the new way later.
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
            row = connection.execute(slot_sql.IS_READ).fetchone()
            if row is None or not row[1]:
                say("no relay runs: the next one continues from the slot")
                return
            if row[0]:
                say("the relay reads from the slot")
                return
            time.sleep(_POLL)
    say("the relay still publishes what the slot does not deliver; it will read from the slot afterwards")


def read(settings: OutboxSettings) -> Slots:
    """Return the state of the slots that concern an outbox.

    Raises:
        SetupError: the outbox is not set up.
    """
    with closing(connect_to_outbox(settings, name="outbox cdc status")) as connection:
        row = connection.execute(
            quality_sql.SLOTS, {"setup_lock": f"{settings.db_schema}.outbox_cdc"}
        ).fetchone()
    assert row is not None
    return slots(row[0])
