"""The replication slots that concern an outbox: what is wrong with them, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SETUP: Final = "run `outbox cdc setup`, which makes a new one"

_COPY: Final = (
    "position and slot are those of another database (a restored dump or a copy): run `outbox relay "
    "--rebase`, which explains and adopts it, before any writer starts"
)

_TAKE_BACK: Final = (
    "run `outbox cutover --to polling`; the relay then looks into the topics for what was published"
)

AHEAD: Final = (
    "Debezium publishes a transaction before the synchronous standby has it, and a failover may undo it: "
    "name the standby's slot in synchronized_standby_slots (PostgreSQL 17 and later)"
)
"""The relay waits for the standby; a connector publishes whatever its slot delivers."""


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
    connector: str | None
    """The connector that publishes what it delivers, in place of the relay, until it is removed."""
    connector_state: str | None
    """How far the change to it or from it is: begins, publishes, ends."""
    exists: bool
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
    ahead: bool
    """Whether the server delivers transactions that its synchronous standby may not have."""
    waiting_commits: int
    """Commits that have waited for a synchronous standby for seconds, as far as the role may see them."""
    others: list[OtherSlot]

    @property
    def source(self) -> str:
        """Who reads events, and where: the relay by `cdc` or `polling`, or `debezium`."""
        if self.connector_state in ("publishes", "ends"):
            return "debezium"
        return "cdc" if self.slot is not None and self.made and not self.ends else "polling"

    @property
    def problems(self) -> list[str]:
        """What a person must act on, each with the remedy."""
        if self.copy and self.slot is not None:
            return [_COPY]
        if self.changing:
            return []
        return [*self._problems_of_slot(), *self._problems_of_rest()]

    def _problems_of_slot(self) -> list[str]:
        if self.slot is None:
            return []
        if self.ends:
            return ["dropping the slot was interrupted: run `outbox cutover --to polling` again"]
        if not self.made:
            by = "" if self.reader is None else f", and process {self.reader} of the server still makes it"
            return [f"setup was interrupted while it made the slot{by}: {_SETUP}, or `outbox cdc drop`"]
        if not self.exists:
            if self.connector_state == "publishes":
                return [f"the slot {self.slot} of the connector {self.connector} is missing: {_TAKE_BACK}"]
            return [f"the slot {self.slot} is missing, so events are read between snapshots: {_SETUP}"]
        if self.invalidation_reason or self.wal_status == "lost":
            why = self.invalidation_reason or "its log was removed, see max_slot_wal_keep_size"
            if self.connector_state == "publishes":
                return [f"the slot {self.slot} of the connector is lost ({why}): {_TAKE_BACK}"]
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
        if self.connector_state is not None:
            return self._problems_of_connector()
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

    def _problems_of_connector(self) -> list[str]:
        name = self.connector
        if self.connector_state == "begins":
            why = f" ({self.error})" if self.error else ""
            return [
                f"a change to the connector {name} was interrupted{why}: run `outbox cutover --to debezium` "
                "again, or --to cdc to keep the relay"
            ]
        if self.connector_state == "ends":
            after = f": {self.error}" if self.error else ": start `outbox relay`"
            return [f"the connector has ended, and the relay has not yet continued{after}"]
        if self.reader is None:
            return [
                f"the connector {name} does not read the slot, and the server keeps its log: run `outbox "
                "cutover --to debezium`, which starts it and says why it does not run, or --to cdc, and the "
                "relay publishes again"
            ]
        return []

    def _problems_of_rest(self) -> list[str]:
        if self.connector is None or self.connector_state is not None:
            return []
        return [
            f"the connector {self.connector} was stopped and not removed from Kafka Connect: run `outbox "
            f"cutover --to {self.source}` again, which removes it"
        ]

    @property
    def warnings(self) -> list[str]:
        """What a person should know."""
        found = []
        if self.slot is not None and self.unlimited:
            found.append(
                "max_slot_wal_keep_size is not set: if no relay reads the slot for long, the log fills the "
                "disk"
            )
        if self.ahead and self.connector_state == "publishes":
            found.append(AHEAD)
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
        if self.connector is not None:
            lines.append(f"connector: {self.connector} ({self.connector_state or 'to be removed'})")
        if self.exists:
            lines += [
                "read by: " + ("no process" if self.reader is None else f"server process {self.reader}"),
                f"log kept for it: {size(self.retained_bytes)}",
                f"log that is not settled: {size(self.unconfirmed_bytes)}",
                f"log until it is lost: {'no limit' if self.safe_bytes is None else size(self.safe_bytes)}",
            ]
        return lines + [f"note: {warning}" for warning in self.warnings]


def size(count: float | None) -> str:
    """Return a number of bytes for people."""
    if count is None:
        return "unknown"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} bytes"
