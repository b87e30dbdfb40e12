"""Deliberate breaks of the relay's core, one for each of its decisions; the model has to find every one.

Each replaces a function of the core by a wrong one, as a change that looks harmless could.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay.core import record
from outbox_pipelines.relay.core.barrier import Barrier, Step
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.delivery import Complete, Delivery
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.ledger import Ledger
from outbox_pipelines.relay.core.parked import Tried, Verdict
from outbox_pipelines.relay.core.producers import CommitAnswer, FirstAcknowledgments
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.retries import Retries
from outbox_pipelines.relay.core.settler import Settler
from outbox_pipelines.relay.core.transactions import TransactionalPublisher
from tests.model.explore import Result, explore
from tests.model.relay import kafka, parked, process
from tests.model.relay.database import Database
from tests.model.relay.world import Relays


class Patch(Protocol):
    """Replaces an attribute until the test ends."""

    def __call__(self, target: Any, name: str, value: Any) -> None: ...


@dataclass(frozen=True)
class Break:
    """A wrong core, and the world that shows it."""

    about: str
    apply: Callable[[Patch], None]
    writers: tuple[str, ...] = ("ab", "a")
    world: dict[str, Any] = field(default_factory=dict)


BREAKS: Final[dict[str, Break]] = {}
_STATES: Final = 60_000


def found(one: Break, patch: Patch) -> Result:
    """Explore a world whose core is broken, until something is found."""
    one.apply(patch)
    return explore(Relays(one.writers, **one.world), states=_STATES)


_ONCE: Final = {"exactly_once": True}


def _break(about: str, *writers: str, **world: Any) -> Callable[[Callable[[Patch], None]], None]:
    def kept(apply: Callable[[Patch], None]) -> None:
        chosen = {"faults": 1, "switches": 0} | world
        BREAKS[apply.__name__] = Break(about, apply, writers or ("ab", "a"), chosen)

    return kept


def _forged(delivery: Delivery) -> Complete:
    complete = object.__new__(Complete)
    complete.batch, complete.parked = delivery.batch, delivery.parked
    complete.begun_at, complete.is_in_table = delivery.begun_at, delivery.is_in_table
    return complete


# --- transactions -------------------------------------------------------------------------------------------


@_break("a batch joins a transaction whose commit has begun", "abc", batch_events=1, **_ONCE)
def joins_a_commit(patch: Patch) -> None:
    def committed(self: TransactionalPublisher) -> None:
        self._complete += [_forged(delivery) for delivery in self._deliveries]
        self._deliveries.clear()
        self._go("committed")
        self._committing = []

    patch(TransactionalPublisher, "takes", lambda self, batch: not (self._opens(batch) and self._deliveries))
    patch(TransactionalPublisher, "_committed", committed)


@_break("a tick is opened before released events are removed", "a", "b", parked=["waiting"], **_ONCE)
def removes_late(patch: Patch) -> None:
    settle = Settler._move

    def settled(self: Settler, *, last: bool = False) -> int | None:
        batches, requests = self._ledger.take()
        ticks = [batch for batch in batches if isinstance(batch.batch, Batch)]
        for batch in ticks:
            self._position = batch.moves(self._position)
        tick_id = None
        for request in requests:
            if request.position is not None:
                self._position = self._position.opened_as(request.position)
            tick_id = request.tick_id or tick_id
        events = 0
        if last or tick_id or any(batch.batch.events for batch in ticks):
            events = settle(self, ticks, tick_id, last=last)
        for batch in batches:
            if isinstance(batch.batch, ReleasedBatch):
                self._retries.settled(batch)
        self._ledger.settled(batches)
        self._answer(requests)
        return events if batches else None

    patch(Settler, "settle", settled)


@_break("a tick is not opened in the database", **_ONCE)
def opens_nothing(patch: Patch) -> None:
    patch(Flow, "open_tick", lambda self, position, tick_id: None)


@_break("a transaction is committed before its tick is open", **_ONCE)
def does_not_await(patch: Patch) -> None:
    patch(Flow, "await_tick", lambda self: None)


@_break("all ticks have the same id", "a", "b", **_ONCE)
def one_id(patch: Patch) -> None:
    patch(Relays, "new_id", lambda self: "1")


@_break("what a transaction holds back is not in the table before its commit", refuses=[1], **_ONCE)
def parks_late(patch: Patch) -> None:
    patch(Flow, "park", lambda self, deliveries: None)


@_break(
    "released events are not removed before the next record",
    "a",
    "bc",
    parked=["waiting"],
    batch_events=1,
    **_ONCE,
)
def forgets_to_settle(patch: Patch) -> None:
    patch(Flow, "settle_all", lambda self: None)


@_break("a record says that its tick is finished, always", "ab", batch_events=1, **_ONCE)
def always_finished(patch: Patch) -> None:
    made = kafka.Producer.record

    def recorded(
        self: kafka.Producer, tick: str, last_seq: int, *, finished: bool, released: list[int]
    ) -> Any:
        return made(self, tick, last_seq, finished=True, released=released)

    patch(kafka.Producer, "record", recorded)


@_break("a record never says that its tick is finished", "ab", **_ONCE)
def never_moves_on(patch: Patch) -> None:
    def stays(self: Position, last_seq: int, *, finished: bool) -> Position:
        return self

    patch(Position, "published_up_to", stays)


@_break(
    "what a batch holds back is settled before its tick is open",
    "ab",
    refuses=[1],
    batch_events=1,
    switches=0,
    faults=0,
    **_ONCE,
)
def settles_before_the_tick(patch: Patch) -> None:
    acknowledged = TransactionalPublisher.acknowledged

    def hasty(self: TransactionalPublisher) -> Any:
        await_tick = Flow.await_tick
        patch(Flow, "await_tick", lambda flow: None)
        try:
            return acknowledged(self)
        finally:
            patch(Flow, "await_tick", await_tick)

    patch(TransactionalPublisher, "acknowledged", hasty)


@_break(
    "a record passes over what was held back outside of its transaction, before that is in the table",
    "ab",
    unreadable=[1],
    batch_events=1,
    **_ONCE,
)
def passes_over_held_back(patch: Patch) -> None:
    acknowledged = TransactionalPublisher.acknowledged

    def forgetful(self: TransactionalPublisher) -> Any:
        complete = acknowledged(self)
        self._must_settle = False
        return complete

    patch(TransactionalPublisher, "acknowledged", forgetful)


@_break("a record of another tick is believed", "a", "b", faults=2, **_ONCE)
def believes_all(patch: Patch) -> None:
    def taken_up(shard: record.TakenShard, last: record.Record | None) -> None:
        if last is not None:
            moved = shard.position.published_up_to(last.last_seq, finished=last.finished)
            if moved != shard.position:
                shard.settle(moved)

    patch(process, "take_up", taken_up)


@_break("Kafka's record is not asked", **_ONCE)
def believes_nothing(patch: Patch) -> None:
    patch(process, "take_up", lambda shard, last: None)


@_break("released events that the record names are not removed", "a", parked=["waiting"], **_ONCE)
def forgets_released(patch: Patch) -> None:
    def taken_up(shard: record.TakenShard, last: record.Record | None) -> None:
        if last is not None:
            record.take_up(shard, record.Record(last.tick, last.last_seq, last.finished, []))

    patch(process, "take_up", taken_up)


@_break("no answer to a commit counts as done", "ab", **_ONCE)
def no_answer_is_done(patch: Patch) -> None:
    commit = kafka.Producer.commit

    def optimistic(self: kafka.Producer) -> CommitAnswer:
        answer = commit(self)
        return CommitAnswer.DONE if answer is CommitAnswer.NONE else answer

    patch(kafka.Producer, "commit", optimistic)


@_break("a commit begins while something is not sent", "abc", batch_events=3, **_ONCE)
def commits_unsent(patch: Patch) -> None:
    commit, send = TransactionalPublisher._commit, kafka.Producer.send

    def hasty(self: TransactionalPublisher) -> None:
        unsent = [(delivery, delivery.unsent) for delivery in self._deliveries]
        for delivery, _ in unsent:
            delivery.unsent = []
        commit(self)
        for delivery, events in unsent:
            if delivery in self._deliveries:
                delivery.unsent = events

    def committed(self: TransactionalPublisher) -> None:
        self._complete += [_forged(delivery) for delivery in self._committing]
        for delivery in self._committing:
            self._deliveries.remove(delivery)
        self._go("committed")
        self._committing = []

    def one_at_a_time(self: kafka.Producer, delivery: Delivery, events: Any, gate: Any) -> Any:
        return [*send(self, delivery, events[:1], gate), *events[1:]]

    patch(TransactionalPublisher, "_commit", hasty)
    patch(TransactionalPublisher, "_committed", committed)
    patch(kafka.Producer, "send", one_at_a_time)


@_break("after an abort nothing is sent again", "ab", refuses=[1], faults=0, **_ONCE)
def no_restart(patch: Patch) -> None:
    patch(Delivery, "restart", lambda self: None)


@_break("a refused commit is taken for a committed one", "ab", **_ONCE)
def refused_is_done(patch: Patch) -> None:
    commit = kafka.Producer.commit

    def optimistic(self: kafka.Producer) -> CommitAnswer:
        answer = commit(self)
        return CommitAnswer.DONE if answer is CommitAnswer.REFUSED else answer

    patch(kafka.Producer, "commit", optimistic)
    patch(Delivery, "complete", _forged)


@_break(
    "the record is written before the events are acknowledged",
    "ab",
    batch_events=1,
    late=1,
    notices=False,
    **_ONCE,
)
def records_unacknowledged(patch: Patch) -> None:
    patch(kafka.Producer, "in_flight", 0)


@_break("a producer is kept after a commit that was asked for twice", "ab", batch_events=1, late=1, **_ONCE)
def kept_after_a_commit(patch: Patch) -> None:
    commit = kafka.Producer.commit

    def careless(self: kafka.Producer) -> CommitAnswer:
        answer = commit(self)
        return CommitAnswer.DONE if answer is CommitAnswer.REPEATED else answer

    patch(kafka.Producer, "commit", careless)


@_break(
    "a producer is kept after a commit that was not answered at first", "ab", batch_events=1, late=1, **_ONCE
)
def kept_after_silence(patch: Patch) -> None:
    committed = TransactionalPublisher._committed

    def careless(self: TransactionalPublisher) -> None:
        committed(self)
        self._must_replace = False

    patch(TransactionalPublisher, "_committed", careless)


@_break("a producer is kept after an abort", "ab", refuses=[1], mends=1, **_ONCE)
def kept_after_an_abort(patch: Patch) -> None:
    abort = TransactionalPublisher._abort

    def careless(self: TransactionalPublisher) -> None:
        abort(self)
        self._must_replace = False

    patch(TransactionalPublisher, "_abort", careless)


@_break(
    "a relay that has lost the shard takes a new producer",
    *("a", "b"),
    refuses=[1],
    batch_events=1,
    slots=2,
    **_ONCE,
)
def fences_its_successor(patch: Patch) -> None:
    def hasty(self: TransactionalPublisher) -> bool:
        self._producer.replace()
        self._must_replace = False
        return True

    patch(TransactionalPublisher, "_replace", hasty)


# --- publishing ---------------------------------------------------------------------------------------------


@_break("events of a blocked aggregate are sent", "a", "a", refuses=[1], faults=0, mends=1)
def sends_blocked(patch: Patch) -> None:
    patch(Publisher, "blocked", lambda self, delivery: ())


@_break("a refused event does not block its aggregate", "a", "a", refuses=[1], faults=0, mends=1)
def blocks_nothing(patch: Patch) -> None:
    park = BlockedAggregates.park
    patch(BlockedAggregates, "park", lambda self, event, *, suspect=False: suspect or park(self, event))


@_break("events are sent behind a key's first of a new producer", refuses=[1], mends=1, faults=0)
def begins_with_many(patch: Patch) -> None:
    patch(FirstAcknowledgments, "is_awaited", lambda self, topic, key: False)


@_break("after a refusal the rest is sent again in another order", "baa", batch_events=1, refuses=[1])
def sends_out_of_order(patch: Patch) -> None:
    reclaim = Delivery.reclaim

    def reversed_(self: Delivery, identify: Any) -> Any:
        found = reclaim(self, identify)
        self.unsent = list(reversed(self.unsent))
        return found

    patch(Delivery, "reclaim", reversed_)
    patch(Publisher, "_pump", _backwards)


def _backwards(self: Publisher) -> None:
    for delivery in reversed(self._deliveries):
        if delivery.unsent:
            delivery.unsent = self._producer.send(delivery, delivery.unsent, self)


@_break("what was purged behind a refusal counts as acknowledged", "ab", "b", refuses=[1])
def purged_is_acknowledged(patch: Patch) -> None:
    def report(self: Delivery, error: Any, message: object) -> None:
        if error is None or error.reason == "purged":
            self.acknowledged += 1
        else:
            self.failed.append((message, error))

    patch(Delivery, "report", report)


@_break("a refused event counts as acknowledged", "a", refuses=[1], faults=0)
def refused_is_acknowledged(patch: Patch) -> None:
    def report(self: Delivery, error: Any, message: object) -> None:
        self.acknowledged += 1

    patch(Delivery, "report", report)


@_break("a batch is complete while events of it are in flight", "ab", faults=0)
def complete_in_flight(patch: Patch) -> None:
    patch(Delivery, "is_complete", property(lambda self: not (self.unsent or self.failed)))


@_break("after a failure what was in flight is not sent again", "ab", refuses=[1], faults=1)
def not_sent_again(patch: Patch) -> None:
    def reclaim(self: Delivery, identify: Any) -> Any:
        failed = identify(self.in_flight, self.failed)
        self.in_flight, self.failed = [], []
        return [one for one in failed if one[1].reason != "purged"]

    patch(Delivery, "reclaim", reclaim)


# --- settling -----------------------------------------------------------------------------------------------


@_break("the position moves, and what is held back is not parked", "ab", refuses=[1], faults=0)
def parks_nothing(patch: Patch) -> None:
    patch(Complete, "parked_states", lambda self: {})


@_break("the position moves to the end of the tick with its first batch", "abc", batch_events=1)
def moves_too_far(patch: Patch) -> None:
    def moves(self: Complete, position: Position) -> Position:
        assert isinstance(self.batch, Batch)
        return Position(self.batch.target)

    patch(Complete, "moves", moves)


@_break("the position does not move inside a tick", "abc", batch_events=1)
def never_moves(patch: Patch) -> None:
    patch(Complete, "moves", lambda self, position: position)


@_break("the blocked aggregates do not learn what is in the table", "a", refuses=[1], faults=0)
def tells_nobody(patch: Patch) -> None:
    patch(BlockedAggregates, "parked", lambda self, events: None)


@_break("a request is done before it is written", refuses=[1], **_ONCE)
def done_before_written(patch: Patch) -> None:
    request = Ledger.request

    def ordered(self: Ledger, wanted: Any) -> None:
        request(self, wanted)
        wanted.is_done = True

    patch(Ledger, "request", ordered)


@_break("batches are settled in another order", "abc", batch_events=1, faults=0)
def settles_backwards(patch: Patch) -> None:
    take = Ledger.take

    def taken(self: Ledger) -> Any:
        batches, requests = take(self)
        return batches[::-1], requests

    patch(Ledger, "take", taken)


@_break("a predecessor's tick is joined with the next one", "a", "b", **_ONCE)
def joins_ticks(patch: Patch) -> None:
    patch(Batch, "is_whole", property(lambda self: self.ends_tick))


# --- what is parked -----------------------------------------------------------------------------------------


@_break("parked events are tried before the position covers them", "aa", refuses=[1], mends=1, **_ONCE)
def tries_uncovered(patch: Patch) -> None:
    patch(Database, "covers", lambda self, position, seq: True)


@_break("two runs of one aggregate are in progress at once", "aa", refuses=[1], mends=1, faults=0)
def never_busy(patch: Patch) -> None:
    def due(self: BlockedAggregates, limit: int) -> Any:
        return list(self.aggregates)[:limit]

    patch(BlockedAggregates, "due", due)
    patch(Retries, "_is_occupied", property(lambda self: self._prober.is_busy))


@_break(
    "an aggregate is freed while its events are in flight",
    "a",
    "a",
    "a",
    parked=["waiting"],
    switches=1,
    faults=0,
)
def frees_too_early(patch: Patch) -> None:
    def free(self: BlockedAggregates, aggregate: Any) -> None:
        self.aggregates.pop(aggregate, None)

    def told(self: BlockedAggregates, events: Any) -> None:
        for event in events:
            entry = self.aggregates.get((event.aggregate_type, event.aggregate_id))
            if entry is not None:
                entry.in_flight -= 1
                entry.due = self._next = 0.0

    patch(BlockedAggregates, "free", free)
    patch(BlockedAggregates, "parked", told)


@_break("an outage counts as an attempt", "a", parked=["retrying"])
def outage_counts(patch: Patch) -> None:
    recorded = parked.ModelTable.record

    def counted(self: parked.ModelTable, tried: Any, pauses: Any) -> Any:
        tried = [
            Tried(one.attempt, Verdict.REFUSED) if one.verdict is Verdict.UNKNOWN else one for one in tried
        ]
        return recorded(self, tried, pauses)

    patch(parked.ModelTable, "record", counted)


@_break("no answer counts as published", "a", refuses=[1])
def no_answer_is_published(patch: Patch) -> None:
    verdict = parked.ModelProber._verdict

    def optimistic(self: parked.ModelProber, seq: int) -> Verdict:
        found = verdict(self, seq)
        return Verdict.PUBLISHED if found is Verdict.UNKNOWN else found

    patch(parked.ModelProber, "_verdict", optimistic)


@_break("what was rehearsed counts as published", "a", refuses=[1], mends=1, faults=0, **_ONCE)
def rehearsed_is_published(patch: Patch) -> None:
    verdict = parked.ModelProber._verdict

    def optimistic(self: parked.ModelProber, seq: int) -> Verdict:
        found = verdict(self, seq)
        return Verdict.PUBLISHED if found is Verdict.ACCEPTED else found

    patch(parked.ModelProber, "_verdict", optimistic)


@_break("a verdict is written and the aggregate forgotten", "a", refuses=[1], faults=0)
def forgets_the_aggregate(patch: Patch) -> None:
    record_ = Retries._record

    def forgetful(self: Retries, tried: Any) -> None:
        again = self._blocked.schedule
        self._blocked.schedule = lambda *args: None  # type: ignore[method-assign]
        record_(self, tried)
        self._blocked.schedule = again  # type: ignore[method-assign]
        del self._blocked.__dict__["schedule"]

    patch(Retries, "_record", forgetful)


@_break("all events of a released run count as published", "aa", "a", refuses=[1, 2], mends=0, faults=0)
def run_is_published(patch: Patch) -> None:
    patch(Complete, "published", lambda self: self.batch.events)


@_break("a settled run stays in progress", "aaaa", refuses=[1], mends=1, faults=0)
def run_never_ends(patch: Patch) -> None:
    settled = Retries.settled

    def kept(self: Retries, complete: Complete) -> None:
        in_flight = list(self._in_flight)
        settled(self, complete)
        for run in in_flight:
            run.is_alone = True
        self._in_flight = in_flight

    patch(Retries, "settled", kept)


@_break("what a predecessor has parked is not read", "a", "a", refuses=[1], mends=1)
def forgets_the_parked(patch: Patch) -> None:
    def begun(self: Retries, *, crashed: bool) -> None:
        self._table.take_over(crashed=crashed)
        self._revision = self._table.revision()

    patch(Retries, "begin", begun)


@_break("a replayed dead letter is not noticed", "a", refuses=[1], mends=1, commands=1, faults=0)
def hears_no_news(patch: Patch) -> None:
    patch(Retries, "_refresh", _first_news)


def _first_news(self: Retries, now: float) -> None:
    if self._revision < 0:
        self._revision = self._table.revision()
        self._blocked.load(self._table.blocked())
    self._refresh_at = now + 1


@_break(
    "what was suspected among released events is sent on",
    "aaa",
    refuses=[2],
    mends=1,
    faults=0,
    parked=["waiting"] * 3,
)
def halts_nothing(patch: Patch) -> None:
    blocked = Publisher.blocked

    def asked(self: Publisher, delivery: Delivery) -> Any:
        return () if isinstance(delivery.batch, ReleasedBatch) else blocked(self, delivery)

    patch(Publisher, "blocked", asked)


# --- another number of shards -------------------------------------------------------------------------------


@_break("a relay goes to a barrier that it may have passed", "a", changes=1, **_ONCE)
def goes_back(patch: Patch) -> None:
    def step(self: Barrier, change: Any) -> Step:
        change.barrier_paused = change.barrier_paused or change.barrier is not None
        return asked(self, change)

    asked = Barrier.step
    patch(Barrier, "step", step)
    patch(Snapshot, "covers", lambda self, other: True)
    patch(Relays, "_of_shards", _careless)


def _careless(self: Relays) -> list[Any]:
    found = [action for action in of_shards(self) if action[0] != "meet again"]
    if self.database.barrier_reached and ("begin anew",) not in found:
        found.append(("begin anew",))
    return found


of_shards = Relays._of_shards


@_break("a relay reports that it is paused before it has settled everything", "a", "a", changes=1, faults=0)
def holds_too_early(patch: Patch) -> None:
    def meet(self: process.Process) -> bool:
        database = self.world.database
        going = asked(self)
        if database.wanted and self.barrier.is_taking_part:
            database.barrier_paused = True
            if database.barrier is not None:
                database.barrier_reached = True
        return going

    asked = process.Process.meet
    patch(process.Process, "meet", meet)


@_break("a relay continues to read while it is paused", "a", "a", changes=1, faults=0)
def reads_on(patch: Patch) -> None:
    patch(Barrier, "is_taking_part", property(lambda self: False))


@_break("new shards begin while parked events are tried", "a", parked=["retrying"], changes=1, faults=0)
def tries_on(patch: Patch) -> None:
    patch(Settler, "may_try", property(lambda self: True))
    patch(Retries, "is_quiet", property(lambda self: True))


@_break(
    "the last verdicts of a relay that stops are dropped",
    *("a", "a"),
    parked=["retrying"],
    slots=2,
    stops=1,
    faults=0,
)
def drops_last_verdicts(patch: Patch) -> None:
    patch(Retries, "close", lambda self: None)
