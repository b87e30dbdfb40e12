"""`outbox cutover`: changes who reads events and where, and watches until that is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final

from outbox_pipelines.database import connect
from outbox_pipelines.quality.slots import AHEAD
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.connector import from_connector, to_connector
from outbox_pipelines.relay.cdc.setup import remove, require_slots, set_up
from outbox_pipelines.relay.cdc.status import read
from outbox_pipelines.settings import Settings

_POLL: Final = 0.1


def plan(settings: Settings, target: str) -> list[str]:
    """Return what `run` would do.

    Raises:
        SetupError: something is missing.
    """
    found = read(settings)
    has_connector = found.connector_state == "publishes"
    if found.source == target and (found.reader is not None if has_connector else found.connector is None):
        return [f"nothing to do: events are published by {target} already"]
    if target == "debezium" and has_connector:
        return ["1. the connector is registered if it is missing, and started if it is stopped"]
    steps = []
    if found.source == "debezium":
        steps += [
            f"the connector {found.connector} is stopped",
            "the relay finds out, by slot and topics, what the connector has published, and continues",
        ]
    if found.connector is not None and found.connector_state != "begins":
        steps.append("the connector and its progress are removed from Kafka Connect")
    if target == "polling" and found.slot is not None:
        steps += [
            "the relay stops reading the slot, and continues between snapshots at the same position",
            f"the slot {found.slot} is dropped",
        ]
    if target != "polling" and found.source == "polling":
        require_slots(settings)
        steps += [
            "the publication is made if it is missing",
            "a slot is made, when all transactions that run now have ended; relays publish as before",
            "a relay that has published everything that is older than the slot continues from the slot",
        ]
    if target == "debezium":
        settings.require_connect()
        steps += [
            "the relay publishes what it has read, confirms the slot there, and leaves it",
            "the connector is registered, and continues from the slot",
            "the relay follows the slot, so that days are closed and archived as before",
        ]
    notes = [f"note: {AHEAD}"] if target == "debezium" and found.ahead else []
    return [f"{number}. {step}" for number, step in enumerate(steps, 1)] + notes


def run(
    settings: Settings,
    target: str,
    *,
    seconds: float,
    say: Callable[[str], None],
    place: Mapping[str, Any] | None = None,
) -> None:
    """Change who reads events and where, and wait until it does.

    Args:
        target: cdc, polling or debezium.
        seconds: how long each step may wait, at most.
        place: for debezium, how its workers reach the database, as `debezium.config.connector` takes it.

    Raises:
        SetupError: something is missing; nothing has changed.
        NotReadyError: it took too long; events are published as before, or by the new way later.
    """
    if target == "debezium":
        to_connector(settings, place or {"password": ""}, seconds=seconds, say=say)
        if read(settings).ahead:
            say(f"note: {AHEAD}")
        return
    from_connector(settings, seconds=seconds, say=say)
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
