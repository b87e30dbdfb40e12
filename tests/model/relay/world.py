"""Relays, writers, operators and time around one shard; what must hold in every state of it.

Invariants checked:
- G1: what the position covers, Kafka has, or it is parked; nothing is published that did not commit.
- G2: first deliveries of an aggregate follow `seq`, but for dead letters.
- G5: exactly_once: no event is visible twice; at_least_once: none is published twice before something fails.
- What was removed from the parked ones as published, Kafka has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outbox_pipelines.core.position import Position
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.retries import MAX_CRASHES
from outbox_pipelines.relay.core.transactions import TransactionalPublisher
from tests.model.explore import Action, Broken, Key
from tests.model.relay.database import Database, ParkedRow
from tests.model.relay.kafka import GONE, Kafka
from tests.model.relay.process import DeadError, ImpossibleError, Plan, Process
from tests.model.relay.sharing import share
from tests.model.relay.symmetry import relays_key
from tests.model.snapshot import Snapshot

share()
DATABASE_CALLS = ("settle", "park", "remove released")
PARKED_CALLS = ("heads", "behind", "mark as tried", "record", "accept", "clear")
KAFKA_CALLS = ("send", "begin", "commit", "abort", "fence")
PUBLISH_CALLS = ("send", "begin", "commit", "abort", "fence")
PROBE = ("no answer, not done", "no answer, done")
COMMIT = ("no answer, not done", "no answer, done", "in doubt, not done", "in doubt, done", "record refused")
LATE: Sequence[Plan] = (("commit", "asked twice"), ("abort", "asked twice"))
NO_PRODUCER: Plan = ("fence", "no answer")


def plans(calls: Sequence[str]) -> list[Plan]:
    """What can go wrong in a round that makes these calls."""
    found: list[Plan] = []
    for call in calls:
        found += [(call, "dies before"), (call, "dies after")]
        if call not in KAFKA_CALLS:
            found += [(call, "fails"), (call, "answer lost")]
        if call == "commit":
            found += [(call, what) for what in COMMIT]
    return found


WAIT: Plan = ("await reports", "no answer")


class Watched(TransactionalPublisher):
    """Says which transitions were made."""

    def _go(self, why: str) -> None:
        before = self._phase
        super()._go(why)
        self._producer._process.world.covered.add(f"{before.value}: {why}")  # type: ignore[attr-defined]


class Clock:
    """Blocks until the scheduler moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Relays:
    """A world with one shard.

    Args:
        writers: what each transaction writes: the aggregates of its events.
        refuses: seqs of events that Kafka does not take.
        unreadable: seqs of events whose row the database cannot read.
        slots: how many relays there may be at once.
        faults: how many things may go wrong.
        switches: how often a thread's round may come in between another's.
        rollbacks: how many transactions may fail.
        stops: how many relays are asked to stop.
        mends: whether the operator makes Kafka accept what it refuses.
        commands: how many dead letters are replayed or discarded.
        changes: how often the number of shards is changed.
        parked: states of the first events, which an earlier relay has parked.
        late: how many requests to end a transaction are asked twice, and may arrive late.
        notices: whether Kafka's client says which; otherwise events may be published twice, and never lost.
    """

    FAULTS: Collection[str] = (
        *("fault", "late", "overtaken", "kill", "lose session"),
        *("vanish", "rollback", "give up"),
    )

    def __init__(
        self,
        writers: Sequence[Sequence[str]],
        *,
        refuses: Sequence[int] = (),
        unreadable: Sequence[int] = (),
        exactly_once: bool = False,
        slots: int = 1,
        faults: int = 1,
        switches: int = 1,
        rollbacks: int = 0,
        stops: int = 0,
        mends: int = 0,
        commands: int = 0,
        changes: int = 0,
        parked: Sequence[str] = (),
        batch_events: int = 2,
        late: int = 0,
        notices: bool = True,
    ) -> None:
        self.exactly_once = exactly_once
        self.batch_events = batch_events
        self.late = late
        self.notices = notices
        self.database = Database(writers)
        self.kafka = Kafka(refuses)
        self.refused = frozenset(refuses)
        self.unreadable = frozenset(unreadable)
        self.slots: list[Process | None] = [None] * slots
        self.identities = list(range(slots))
        self.faults = faults
        self.has_failed = False
        self.switches = switches
        self.rollbacks = rollbacks
        self.stops = stops
        self.mends = mends
        self.commands = commands
        self.changes = changes
        self.clock = Clock()
        self.ids = 0
        self.covered: set[str] = set()
        self._next_plan: Plan = None
        self._begin_with(parked)

    def _begin_with(self, parked: Sequence[str]) -> None:
        database = self.database
        while len(database.rows) < len(parked):
            writer = database.state.index("new")
            database.insert(writer)
            database.finish(writer, "committed")
        if parked:
            database.done = Position(database.snapshot()), "0" if self.exactly_once else None
            database.parked = {seq: ParkedRow(state) for seq, state in enumerate(parked, start=1)}

    # --- what processes ask for ---------------------------------------------------------------------------

    transactional = Watched

    def plan_for(self, process: Process) -> None:
        process.plan, self._next_plan = self._next_plan, None

    def new_id(self) -> str:
        self.ids += 1
        return str(self.ids)

    # --- actions ------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        database = self.database
        found: list[Action] = []
        for n, state in enumerate(database.state):
            if database.may_insert(n):
                found.append(("insert", n))
            elif state == "open":
                found.append(("commit", n))
                if self.rollbacks:
                    found.append(("rollback", n))
        for n, process in enumerate(self.slots):
            if process is None:
                if database.owner == -1:
                    found.append(("start", n))
                    if self.faults and self.exactly_once:
                        found += [("fault", "start", n, plan) for plan in plans(("fence",))]
            else:
                found += self._of_process(n, process)
        if any(process is not None and process.waits() for process in self.slots):
            found.append(("later",))
        found += self._of_shards()
        if self.kafka.late:
            found.append(("late",))
            found += [
                ("overtaken", "publish", n, ("commit", "a late request first"))
                for n, process in enumerate(self.slots)
                if process is not None
            ]
        if self.kafka.refuses and self.mends:
            found.append(("mend",))
        if self.commands:
            for seq, row in sorted(database.parked.items()):
                if row.state == "failed":
                    found += [("replay", seq), ("discard", seq)]
        for n, connection in enumerate(self.kafka.connections):
            if connection.in_flight:
                found.append(("broker", n))
                if not connection.is_open:
                    found.append(("vanish", n))
        return found

    def _of_shards(self) -> list[Action]:
        database = self.database
        if not database.wanted:
            return [("want shards",)] if self.changes else []
        found: list[Action] = [("give up",)] if self.faults else []
        if database.barrier_paused and database.barrier is None:
            found.append(("set barrier",))
        if database.barrier is not None and not database.barrier_paused:
            found.append(("meet again",))
        if database.barrier_reached and database.barrier_paused:
            found.append(("begin anew",))
        return found

    @staticmethod
    def is_pointless(action: Action, made: Mapping[Action, Collection[str]]) -> bool:
        """Whether a plan names a call that the round does not make."""
        if action[0] not in ("fault", "switch", "overtaken"):
            return False
        _, step, n, plan = action
        calls = made.get((step, n))
        return calls is not None and (plan if action[0] == "switch" else plan[0]) not in calls

    def _of_process(self, n: int, process: Process) -> list[Action]:
        found: list[Action] = [("publish", n), ("settle", n)]
        settle_calls = DATABASE_CALLS + (PARKED_CALLS if self.database.parked else ())
        if process.retries.prober.batch:
            found.append(("probe", n))
            if self.faults:
                found += [("fault", "probe", n, ("probe", what)) for what in PROBE]
        if process.can_read():
            found.append(("read", n))
        if process.can_meet():
            found.append(("meet", n))
        if self.stops and not process.is_stopped:
            found.append(("stop", n))
        if self.switches:
            found += [("switch", "publish", n, call) for call in self._publish_calls()]
            found += [("switch", "settle", n, call) for call in settle_calls]
        if self.faults:
            found.append(("kill", n))
            if process.session.barrier_paused():
                found.append(("lose session", n))
            calls = plans(self._publish_calls())
            calls += [NO_PRODUCER] * self.exactly_once + [*LATE] * bool(self.late)
            found += [("fault", "publish", n, plan) for plan in [WAIT, *calls]]
            found += [("fault", "settle", n, plan) for plan in plans(settle_calls)]
        return found

    def _publish_calls(self) -> tuple[str, ...]:
        # Within a transaction the publishing thread waits for what the settling one writes.
        return (*PUBLISH_CALLS, "settle", "park") if self.exactly_once else ("send",)

    def do(self, action: Action) -> None:
        name, *rest = action
        if name == "insert":
            self.database.insert(rest[0])
        elif name == "commit":
            self.database.finish(rest[0], "committed")
        elif name == "rollback":
            self.rollbacks -= 1
            self.database.finish(rest[0], "rolled back")
        elif name == "broker":
            self.kafka.handle(rest[0])
        elif name == "vanish":
            self.kafka.connections[rest[0]].in_flight.clear()
        elif name == "fault":
            self.faults -= 1
            self.has_failed = True
            step, n, plan = rest
            self._round(step, n, plan)
        elif name == "late":
            self.kafka.arrive()
        elif name == "overtaken":
            self._round(*rest)
        elif name == "switch":
            self.switches -= 1
            step, n, call = rest
            before = Snapshot(self)
            try:
                self._round(step, n, (call, "another thread before"))
            except ImpossibleError:
                before.restore()
        elif name == "kill":
            self.faults -= 1
            self.has_failed = True
            self._died(rest[0])
        elif name == "lose session":
            self.faults -= 1
            self.has_failed = True
            self.database.owner = -1
        elif name == "want shards":
            self.changes -= 1
            self.database.want()
        elif name == "give up":
            self.faults -= 1
            self.database.give_up()
        elif name == "set barrier":
            self.database.set_barrier()
        elif name == "meet again":
            self.database.meet_again()
        elif name == "begin anew":
            self.database.begin_anew()
        elif name == "later":
            self.clock.now += 1000.0
            # A relay that stops waits ten seconds for answers; an event without one is published again.
            self.has_failed |= self._is_stopping_in_flight()
        elif name == "mend":
            self.mends -= 1
            self.kafka.refuses.clear()
        elif name in ("replay", "discard"):
            self.commands -= 1
            row = self.database.parked[rest[0]]
            row.state = "replaying" if name == "replay" else "discarded"
            row.due = self.clock()
            self.database.revision += 1
        elif name == "stop":
            self.stops -= 1
            process = self.slots[rest[0]]
            assert process is not None
            process.is_stopped = True
        else:
            self._round(name, rest[0], None)

    def _is_stopping_in_flight(self) -> bool:
        return any(process is not None and process.is_stopped for process in self.slots) and any(
            connection.in_flight for connection in self.kafka.connections
        )

    def _round(self, step: str, n: int, plan: Plan) -> None:
        process = self.slots[n]
        try:
            if process is None:
                self._next_plan = plan
                self.slots[n] = Process(self, n, self.identities[n])
                return
            process.plan = plan
            if step == "read":
                process.read()
            elif step == "meet":
                if not process.meet():
                    process.end(failed=False)
                    self._ended(n)
                    return
            elif step == "probe":
                process.retries.prober.answer()
            elif step == "publish":
                if not process.publish_once():
                    process.end(failed=False)
                    self._ended(n)
                    return
            else:
                process.settle_once()
            process.plan = None
        except DeadError:
            self._died(n)
        except (ImpossibleError, Broken):
            raise
        except ShardLostError:
            self.has_failed = True
            if process is not None:
                process.plan = None
                process.end(failed=True)
            elif self.database.owner == n:
                self.database.owner = -1
            self._ended(n)
        except Exception as error:
            raise Broken("no crash", f"{type(error).__name__}: {error}") from error

    def _died(self, n: int) -> None:
        if self.database.owner == n:
            self.database.owner = -1
        self.identities[n] += len(self.slots)
        self._ended(n)

    def _ended(self, n: int) -> None:
        self.slots[n] = None
        used = {process.producer.number for process in self.slots if process is not None}
        for number, connection in enumerate(self.kafka.connections):
            if number not in used:
                connection.is_open = False
                connection.reports.clear()
                for at, (event, _) in enumerate(connection.in_flight):
                    connection.in_flight[at] = event, None
                if not connection.in_flight:
                    self.kafka.connections[number] = GONE

    # --- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        database, visible = self.database, self.kafka.visible
        committed = database.committed
        position, _ = database.done
        published = set(visible)
        for seq in committed:
            if (
                database.covers(position, seq)
                and seq not in published
                and seq not in database.parked
                and seq not in database.discarded
            ):
                raise Broken("G1", f"event {seq} is passed over, and Kafka does not have it")
        for seq in visible:
            if seq not in committed:
                raise Broken("G1", f"event {seq} is published, and did not commit")
        for seq in database.published_parked - published:
            raise Broken("G1", f"event {seq} was removed as published, and Kafka does not have it")
        for seq, row in database.parked.items():
            if row.attempts and seq not in self.refused:
                raise Broken("G4", f"event {seq} was never refused, and has {row.attempts} attempts")
            never_dead = row.crashes < MAX_CRASHES and seq not in self.refused | self.unreadable
            if row.state == "failed" and never_dead:
                raise Broken("G4", f"event {seq} was never refused, and is a dead letter")
        must_be_once = self.exactly_once and self.notices
        if len(visible) != len(published) and (must_be_once or not self.has_failed):
            raise Broken("G5", f"published twice: {visible}")
        self._check_order(visible)

    def _check_order(self, visible: list[int]) -> None:
        last: dict[str, int] = {}
        seen: set[int] = set()
        for seq in visible:
            aggregate = self.database.rows[seq][1].aggregate_id
            if seq in seen or seq in self.database.ever_dead:
                continue
            if seq < last.get(aggregate, 0):
                raise Broken("G2", f"event {seq} comes after event {last[aggregate]} of its aggregate")
            seen.add(seq)
            last[aggregate] = seq

    def is_done(self) -> bool:
        database = self.database
        published = set(self.kafka.visible)
        position, _ = database.done
        return (
            not database.wanted
            and all(state in ("committed", "rolled back") for state in database.state)
            and all(
                database.covers(position, seq) and (seq in published or seq in database.parked)
                for seq in database.committed
            )
            and all(row.state in ("failed", "discarded") for row in database.parked.values())
        )

    def key(self) -> Key:
        return (
            self.database.key(self.clock()),
            self.kafka.key(),
            *relays_key(self.slots, self.identities, self.database, self.kafka),
            (
                self.faults,
                self.switches,
                self.rollbacks,
                self.stops,
                self.mends,
                self.commands,
                self.changes,
                self.late,
                self.has_failed,
            ),
        )

    def live_key(self) -> Key:
        return self.key()[:4]
