"""The state of an outbox's slot, as the server and the shard's row have it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from outbox_pipelines.database import connect
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.setup import slot_name
from outbox_pipelines.schema import require_schema
from outbox_pipelines.settings import Settings

_MANY_BYTES: Final = 1_000_000_000
_SETUP: Final = "run `outbox cdc setup`, which makes a new one"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """What is known about a slot; sizes in bytes."""

    source: str
    """`cdc` or `polling`: what the shard's row says."""
    slot: str | None
    exists: bool
    reader: int | None
    """The server's process that sends to the relay."""
    retained_bytes: int | None
    """Of the log, which the server keeps for it."""
    unconfirmed_bytes: int | None
    """Of the log, from what is settled to its end."""
    safe_bytes: int | None
    """How much more log until the slot is lost; None: without limit, or unknown."""
    wal_status: str | None
    inactive_since: str | None
    invalidation_reason: str | None
    failover: bool | None
    error: str | None
    """Why the relay could not read it."""
    problems: list[str] = field(default_factory=list)
    """Each with the remedy."""
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it for people."""
        if self.slot is None and not self.exists:
            return ["source: polling (between snapshots); no slot"]
        lines = [f"source: {self.source}", f"slot: {self.slot}"]
        if self.exists:
            lines += [
                "read by: " + ("no relay" if self.reader is None else f"server process {self.reader}"),
                f"log kept for it: {_size(self.retained_bytes)}",
                f"log that is not settled: {_size(self.unconfirmed_bytes)}",
                f"log until it is lost: {'no limit' if self.safe_bytes is None else _size(self.safe_bytes)}",
            ]
        return lines + [f"note: {warning}" for warning in self.warnings]


def read(settings: Settings) -> SlotStatus:
    """Return the state of the slot of an outbox.

    Raises:
        SetupError: the outbox is not set up.
    """
    require_schema(settings)
    with closing(connect(settings, name="outbox cdc status")) as connection:
        version = connection.info.server_version
        row = connection.execute(queries.NAMED).fetchone()
        named, begins, ends = row if row is not None else (None, None, False)
        slot = named or slot_name(settings, connection.info.dbname)
        facts = connection.execute(queries.slot_facts(version), {"slot": slot}).fetchone()
        error = connection.execute(queries.ERROR).fetchone()
        limit = connection.execute(queries.LIMITS).fetchone()
        publication = connection.execute(queries.PUBLICATION, {"slot": slot}).fetchone()
    uses = named is not None and begins is not None and not ends
    values = facts if facts is not None else (None,) * 9
    _, reader, retained, unconfirmed, safe, wal_status, since, invalidated, failover = values
    why = None if error is None else error[0]
    problems, warnings = [], []
    if named is not None and begins is None:
        problems.append(f"setup was interrupted while it made the slot: {_SETUP}, or `outbox cdc drop`")
    elif ends:
        problems.append("dropping the slot was interrupted: run `outbox cutover --to polling` again")
    elif uses and facts is None:
        problems.append(f"the slot is missing, so relays read between snapshots: {_SETUP}")
    elif uses and (invalidated or wal_status == "lost"):
        reason = invalidated or "its log was removed: see max_slot_wal_keep_size"
        problems.append(f"the slot is lost ({reason}), so relays read between snapshots: {_SETUP}")
    elif uses and why:
        problems.append(f"the relay cannot read the slot, so it reads between snapshots: {why}")
    elif uses and reader is None:
        problems.append("no relay reads the slot, and the server keeps its log: start `outbox relay`")
    elif not uses and facts is not None:
        problems.append(f"the slot {slot} exists and is not used: run `outbox cdc drop`")
    if uses and publication != (True, True, True):
        problems.append("the publication is missing or was changed: run `outbox cdc setup`")
    if uses and wal_status == "unreserved":
        problems.append("the slot is about to be lost: its relay is too slow, or does not run")
    if uses and retained is not None and retained > _MANY_BYTES:
        problems.append(f"the server keeps {_size(retained)} of its log for the slot: is its relay running?")
    if uses and limit is not None and limit[0] == "-1":
        warnings.append(
            "max_slot_wal_keep_size is not set: if no relay reads the slot for long, the log fills the disk"
        )
    return SlotStatus(
        source="cdc" if uses else "polling",
        slot=slot if named is not None or facts is not None else None,
        exists=facts is not None,
        reader=reader,
        retained_bytes=retained,
        unconfirmed_bytes=unconfirmed,
        safe_bytes=safe,
        wal_status=wal_status,
        inactive_since=since,
        invalidation_reason=invalidated,
        failover=failover,
        error=why,
        problems=problems,
        warnings=warnings,
    )


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
