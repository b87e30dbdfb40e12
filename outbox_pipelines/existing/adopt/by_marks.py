"""The end of the rows of before the switch, if a relay publishes the table by its marks.

Invariants:
- The relay of the outbox continues only when the table has no pending row.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import table as existing
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.state import State
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings

_POLL: Final = 0.2


def drain(
    settings: Settings,
    connection: Connection,
    mapping: Mapping,
    state: State,
    found: Facts,
    until: float,
    say: Say,
) -> int:
    """Publish the pending rows of the table; return how many.

    Raises:
        NotReadyError: some could not be published in time, or block their aggregates.
    """
    kept, published = replace(mapping, table=state.kept_as), 0
    while existing.exists(connection, kept, settings, found):
        published += publish(
            settings.model_copy(update={"delivery": "at_least_once"}), until, str(found), say
        )
        if time.monotonic() > until:
            left = existing.count(connection, kept, found, settings, marked.BACKLOG)
            wait = "; new events wait for them" if state.state == "draining" else ""
            raise NotReadyError(
                f"{found} still has {left:,} pending rows{wait}. Run the command again; see `outbox "
                "status` for refused rows"
            )
    failed = existing.count(connection, kept, found, settings, marked.FAILURES)
    if failed and settings.on_dead_letter != "block":
        say(f"{failed:,} dead letters stay in {found}: publish or delete them before `finish --drop`")
    if failed and state.state == "draining" and settings.on_dead_letter == "block":
        raise NotReadyError(
            f"{found} has {failed:,} dead letters, which block their aggregates "
            f"(OUTBOX_ON_DEAD_LETTER=block): "
            "publish them (docs/existing-tables.md), or set their aggregates free with continue"
        )
    return published


def has_rows_to_drain(connection: Connection, kept: Mapping, settings: Settings, found: Facts) -> bool:
    """Return whether `drain` has something to do."""
    return existing.exists(connection, kept, settings, found) or (
        existing.has_keys(kept) and existing.has_rows(connection, found.schema, kept.table)
    )


def publish(settings: Settings, until: float, what: str, say: Say) -> int:
    """Publish everything that is due now, or wait for the relay that does."""
    try:
        events = service.relay(settings, until_empty=True, standby=service.Standby.REFUSE).events
    except service.ShardOwnedError as error:
        say(f"waiting: {error}")
        events = 0
    if not events:
        time.sleep(min(_POLL, max(0.0, until - time.monotonic())))
    return events
