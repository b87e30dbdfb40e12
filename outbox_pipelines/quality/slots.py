"""The replication slots that concern an outbox: what is wrong with them, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_pipelines.core.text import size

_SETUP: Final = "run `outbox cdc setup`, which makes a new one"

_COPY: Final = (
    "position and slot are those of another database (a restored dump or a copy): run `outbox relay "
    "--rebase`, which explains and adopts it, before any writer starts"
)


@dataclass(frozen=True, slots=True)
class OtherSlot:
    """A slot of the same database that is not the outbox's, such as Debezium's."""

    slot: str
    active: bool
    retained_bytes: int


@dataclass(frozen=True, slots=True)
class Slots:
    """The outbox's slot, as the shard's row and the server have it; sizes are bytes of the log."""

    slot: str | None
    """None: events are read between snapshots."""
    made: bool
    """Whether its first snapshot is known: a relay may read it."""
    ends: bool
    """Whether it is about to be dropped."""
    changing: bool
    """Whether a process is making or dropping it now."""
    error: str | None
    """Why the relay could not read it."""
    exists: bool
    foreign: bool
    """Whether another slot has its name: a physical one, or one of another database or plugin."""
    reader: int | None
    """The server's process that sends to the relay."""
    retained_bytes: int | None
    """What the server keeps for it."""
    unconfirmed_bytes: int | None
    """From what is settled to the end."""
    safe_bytes: int | None
    """How much more until the slot is lost; None: without limit, or unknown."""
    wal_status: str | None
    inactive_since: str | None
    """On PostgreSQL 17 and later."""
    invalidation_reason: str | None
    """On PostgreSQL 17 and later."""
    published: bool
    """Whether its publication has the outbox."""
    unlimited: bool
    """Whether max_slot_wal_keep_size is not set."""
    copy: bool
    """Whether the position and the slot are those of another database, of which this one is a copy."""
    standbys: list[str]
    """Slots that the server waits for before it delivers anything from this one, and no standby reads."""
    waiting_commits: int
    """Commits that have waited for a synchronous standby for seconds, as far as the role may see them."""
    others: list[OtherSlot]

    @property
    def source(self) -> str:
        """Where the relay reads events: `cdc` or `polling`."""
        return "cdc" if self.slot is not None and self.made and not self.ends else "polling"

    @property
    def problems(self) -> list[str]:
        """What a person must act on, each with the remedy."""
        if self.slot is None:
            return []
        if self.copy:
            return [_COPY]
        if self.changing:
            return []
        if self.ends:
            return ["dropping the slot was interrupted: run `outbox cutover --to polling` again"]
        if self.foreign:
            return [
                f"another slot has the name {self.slot} (physical, or of another database or plugin), so "
                "events are read between snapshots: find out what reads it, drop it, then run `outbox cdc "
                "setup`; or run `outbox cutover --to polling`, which leaves it"
            ]
        if not self.made:
            by = "" if self.reader is None else f", and process {self.reader} of the server still makes it"
            return [f"setup was interrupted while it made the slot{by}: {_SETUP}, or `outbox cdc drop`"]
        if not self.exists:
            return [f"the slot {self.slot} is missing, so events are read between snapshots: {_SETUP}"]
        if self.invalidation_reason or self.wal_status == "lost":
            why = self.invalidation_reason or "its log was removed, see max_slot_wal_keep_size"
            return [f"the slot {self.slot} is lost ({why}), so events are read between snapshots: {_SETUP}"]
        if self.standbys:
            names = ", ".join(self.standbys)
            return [
                f"no standby reads the slot {names} of synchronized_standby_slots, and the server delivers "
                "nothing before it has: start the standby, or remove the name from the setting"
            ]
        if self.waiting_commits:
            return [
                f"{self.waiting_commits} commits wait for a synchronous standby, and events wait with them: "
                "start the standby, or remove it from synchronous_standby_names"
            ]
        found = []
        if not self.published:
            found.append("the slot's publication is missing or has changed: run `outbox cdc setup`")
        if self.error:
            found.append(f"the relay cannot read the slot, so it reads between snapshots: {self.error}")
        elif self.reader is None:
            found.append("no relay reads the slot, and the server keeps its log: start `outbox relay`")
        if self.wal_status == "unreserved":
            found.append("the slot is about to be lost: its relay is too slow, or does not run")
        return found

    @property
    def warnings(self) -> list[str]:
        """What a person should know."""
        found = []
        if self.slot is not None and self.unlimited:
            found.append(
                "max_slot_wal_keep_size is not set: if no relay reads the slot for long, the log fills the "
                "disk"
            )
        found += [
            f"no session reads the slot {other.slot} of this database: {size(other.retained_bytes)} are kept"
            for other in self.others
            if not other.active
        ]
        return found

    @property
    def most_retained(self) -> tuple[int, str]:
        """The most that the server keeps for a slot of this database, and for which."""
        kept = [(other.retained_bytes, other.slot) for other in self.others]
        return max([*kept, (self.retained_bytes or 0, self.slot or "")], default=(0, ""))

    def lines(self) -> list[str]:
        """Return it for people."""
        if self.slot is None:
            lines = ["source: polling (between snapshots); no slot"]
        else:
            lines = [f"source: {self.source}", f"slot: {self.slot}"]
        if self.exists:
            lines += [
                "read by: " + ("no process" if self.reader is None else f"server process {self.reader}"),
                f"log kept for it: {size(self.retained_bytes)}",
                f"log that is not settled: {size(self.unconfirmed_bytes)}",
                f"log until it is lost: {'no limit' if self.safe_bytes is None else size(self.safe_bytes)}",
            ]
        return lines + [f"note: {warning}" for warning in self.warnings]
