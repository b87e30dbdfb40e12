"""Relays, writers, operators and time around one marked table; what must hold in every state of it.

Invariants checked:
- G1: what is marked as published, Kafka has; nothing is published that did not commit.
- G2: an event is published first when each one before it in its aggregate has been, or was deleted, or is a
  dead letter that blocks nothing.
- G4: an event that was never refused has no attempts; a dead letter had all its attempts, or cannot be read.
- G5: none is published twice before something fails: neither at a stop, nor because a row cannot be marked,
  nor because Kafka stands still.
- G2 is not promised, and not checked, where relays share the table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outbox_pipelines.relay.core.outcomes import ShardLostError
from tests.model.explore import Action, Broken, Key
from tests.model.marked.process import ATTEMPTS, Process
from tests.model.marked.table import OTHER, Table
from tests.model.relay.kafka import Kafka
from tests.model.relay.process import DeadError, Plan
from tests.model.relay.symmetry import relays_key
from tests.model.relay.world import PROBE, WAIT, Clock, Relays, plans

CLAIM_CALLS = ("claim", "mark")
REFUSAL_CALLS = ("read", "rehearse", "record")


class Marked(Relays):
    """A world with one marked table.

    Args:
        writers: what each transaction writes: the aggregates of its events.
        refuses: seqs of events that Kafka does not take.
        unreadable: seqs of rows whose content cannot be read.
        unmarkable: seqs of rows that a trigger does not let be marked.
        remembers: whether there are columns for attempts and failures.
        blocks: OUTBOX_ON_DEAD_LETTER=block.
        repairs: how often the operator repairs what is refused, or unreadable, or cannot be marked.
        commands: how many dead letters are made pending again, or rows deleted that cannot be published.
        locks: how often another session locks a row.
        is_shared: whether relays share the table.
    """

    FAULTS: Collection[str] = ("fault", "kill", "lose session", "vanish", "rollback", "stall", "lock")

    def __init__(
        self,
        writers: Sequence[Sequence[str]],
        *,
        refuses: Sequence[int] = (),
        unreadable: Sequence[int] = (),
        unmarkable: Sequence[int] = (),
        remembers: bool = True,
        blocks: bool = False,
        until_empty: bool = False,
        slots: int = 1,
        faults: int = 1,
        switches: int = 1,
        rollbacks: int = 0,
        stops: int = 0,
        repairs: int = 0,
        commands: int = 0,
        locks: int = 0,
        batch_events: int = 2,
        is_shared: bool = False,
    ) -> None:
        self.batch_events = batch_events
        self.blocks = blocks
        self.until_empty = until_empty
        self.table = Table(
            writers,
            unreadable=unreadable,
            unmarkable=unmarkable,
            remembers=remembers,
            is_shared=is_shared,
        )
        self.database = self.table
        self.kafka = Kafka(refuses)
        self.refused = frozenset(refuses)
        self.never_read = frozenset(unreadable)
        self.slots: list[Process | None] = [None] * slots  # type: ignore[assignment]
        self.identities = list(range(slots))
        self.faults = faults
        self.switches = switches
        self.rollbacks = rollbacks
        self.stops = stops
        self.repairs = repairs
        self.commands = commands
        self.locks = locks
        self.has_failed = False
        self.twice: set[int] = set()
        """What may be published twice without a fault."""
        self.clock = Clock()
        self.covered: set[str] = set()
        self._next_plan: Plan = None

    # --- actions ------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        table, kafka = self.table, self.kafka
        found: list[Action] = []
        for n, state in enumerate(table.state):
            if table.may_insert(n):
                found.append(("insert", n))
            elif state == "open":
                found.append(("commit", n))
                if self.rollbacks:
                    found.append(("rollback", n))
        for n, process in enumerate(self.slots):
            if process is not None:
                found += self._of_process(n, process)
            elif table.claimed_by(n):
                found.append(("end claims", n))
            elif table.may_be_taken:
                found.append(("start", n))
        if any(process is not None and process.waits() for process in self.slots):
            found.append(("later",))
        if self.faults and any(connection.in_flight for connection in kafka.connections):
            found.append(("stall",))
        if self.repairs:
            found += [("repair", nth) for nth, wrong in enumerate(self._wrong) if wrong]
        for seq, row in table.there("pending", "failed"):
            if self.commands and row.state == "failed":
                found.append(("pend", seq))
            if self.commands and row.lock is None and (row.state == "failed" or seq in kafka.refuses):
                found.append(("delete", seq))
            if row.lock == OTHER:
                found.append(("unlock", seq))
            elif self.locks and row.lock is None and row.state == "pending":
                found.append(("lock", seq))
        for n, connection in enumerate(kafka.connections):
            if connection.in_flight:
                found.append(("broker", n))
                if not connection.is_open:
                    found.append(("vanish", n))
        return found

    @property
    def _wrong(self) -> tuple[set[int], set[int], set[int]]:
        """What can be repaired: by Kafka's operator, in the row, in the table."""
        return self.kafka.refuses, self.table.unreadable, self.table.unmarkable

    def _of_process(self, n: int, process: Process) -> list[Action]:  # type: ignore[override]
        found: list[Action] = [("publish", n), ("claim", n)]
        calls = CLAIM_CALLS + (REFUSAL_CALLS if process.blocked.aggregates else ())
        if process.retries.prober.batch:
            found.append(("probe", n))
            if self.faults:
                found += [("fault", "probe", n, ("probe", what)) for what in PROBE]
        if self.stops and not process.is_stopped:
            found.append(("stop", n))
        if self.switches:
            found.append(("switch", "publish", n, "send"))
            found += [("switch", "claim", n, call) for call in calls]
        if self.faults:
            found.append(("kill", n))
            if n in self.table.owners:
                found.append(("lose session", n))
            found += [("fault", "publish", n, plan) for plan in [WAIT, *plans(("send",))]]
            found += [("fault", "claim", n, plan) for plan in plans(calls)]
        return found

    def do(self, action: Action) -> None:
        name, *rest = action
        table = self.table
        if name == "end claims":
            table.unlock(rest[0])
        elif name == "stall":
            self.faults -= 1
            self.has_failed |= self._is_stopping_in_flight()
            self.clock.now += 1000.0
        elif name == "lose session":
            table.owners.discard(rest[0])
            super().do(action)
        elif name == "repair":
            self.repairs -= 1
            # What is published and could not be marked, is published again now.
            self.twice |= table.unmarkable & set(self.kafka.visible)
            self._wrong[rest[0]].clear()
        elif name == "pend":
            self.commands -= 1
            table.content[rest[0]].state, table.content[rest[0]].attempts = "pending", 0
        elif name == "delete":
            self.commands -= 1
            table.delete(rest[0])
        elif name == "lock":
            self.locks -= 1
            table.content[rest[0]].lock = OTHER
        elif name == "unlock":
            table.content[rest[0]].lock = None
        else:
            super().do(action)

    def _round(self, step: str, n: int, plan: Plan) -> None:
        if self.slots[n] is not None:
            super()._round(step, n, plan)
            return
        self._next_plan = plan
        try:
            self.slots[n] = Process(self, n, self.identities[n])
        except DeadError:
            self._died(n)
        except ShardLostError:
            self.table.release(n)
            self._ended(n)

    def _died(self, n: int) -> None:
        self.table.owners.discard(n)
        super()._died(n)

    # --- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        table, visible = self.table, self.kafka.visible
        published = set(visible)
        for seq in visible:
            if seq not in table.committed:
                raise Broken("G1", f"event {seq} is published, and did not commit")
        for seq, row in table.there("published", "pending", "failed"):
            if row.state == "published" and seq not in published:
                raise Broken("G1", f"event {seq} is marked, and Kafka does not have it")
            if row.attempts and seq not in self.refused:
                raise Broken("G4", f"event {seq} was never refused, and has {row.attempts} attempts")
            is_dead = row.state == "failed" or seq in table.told
            if is_dead and seq not in self.never_read and seq not in self.refused:
                raise Broken("G4", f"event {seq} was never refused, and is a dead letter")
            if row.state == "failed" and seq not in self.never_read and row.attempts < ATTEMPTS:
                raise Broken("G4", f"event {seq} is a dead letter after {row.attempts} attempts")
        once = [seq for seq in visible if seq not in self.twice]
        if len(once) != len(set(once)) and not self.has_failed:
            raise Broken("G5", f"published twice: {visible}")
        if not table.is_shared:
            self._check_order(visible)

    def _check_order(self, visible: list[int]) -> None:
        table = self.table
        excused = set(table.deleted)
        if not self.blocks:
            excused |= table.ever_dead
        seen: set[int] = set()
        for seq in visible:
            if seq in seen:
                continue
            seen.add(seq)
            if seq in excused:
                continue
            for before in table.committed:
                is_before = before < seq and table.event(before).aggregate_id == table.event(seq).aggregate_id
                if is_before and before not in seen and before not in excused:
                    raise Broken("G2", f"event {seq} is published before event {before} of its aggregate")

    def is_done(self) -> bool:
        table = self.table
        dead = {table.event(seq).aggregate_id for seq, _ in table.there("failed")}
        if not table.remembers:
            dead |= {table.event(seq).aggregate_id for seq in table.told}
        return all(state in ("committed", "rolled back") for state in table.state) and all(
            row.state != "pending"
            or (self.blocks and table.event(seq).aggregate_id in dead)
            or (not table.remembers and seq in table.told)
            for seq, row in table.there("pending", "published", "failed")
        )

    def key(self) -> Key:
        return (
            self.table.key(self.clock()),
            self.kafka.key(),
            *relays_key(self.slots, self.identities, self.table, self.kafka, self.table.key_of),
            (
                self.faults,
                self.switches,
                self.rollbacks,
                self.stops,
                self.repairs,
                self.commands,
                self.locks,
                self.has_failed,
                tuple(sorted(self.twice)),
            ),
        )

    def live_key(self) -> Key:
        return self.key()[:4]
