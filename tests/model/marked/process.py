"""A relay of a marked table in the model: its core, driven as the threads of `claims.worker` drive it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from outbox_pipelines.existing.core.claimer import Claimer
from outbox_pipelines.existing.core.claims import Claims, MarkError
from outbox_pipelines.existing.core.row_retries import RowRetries
from outbox_pipelines.relay.core.batch import BatchQueue
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.crash_guard import CrashGuard
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.parked import DeadLetter
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.quarantine import Quarantine
from tests.model.explore import Broken, Key
from tests.model.marked.table import ModelRefusals, ModelSessions
from tests.model.relay import process
from tests.model.relay.kafka import Producer
from tests.model.relay.parked import Everywhere, ModelProber, _once, _topic
from tests.model.relay.process import ImpossibleError, ModelLedger

ATTEMPTS = 2
PATIENCE = 10.0


class ModelClaims(Claims):
    def __init__(self, process: Any) -> None:
        self.sessions = ModelSessions(
            process, process.world.database, batch_events=process.world.batch_events
        )
        super().__init__(
            self.sessions,
            clock=process.clock,
            most_seconds=PATIENCE,
            is_shared=process.world.table.is_shared,
        )


class ModelRetries(RowRetries):
    def __init__(self, process: Process) -> None:
        self.prober = ModelProber(process, process.world.kafka, rehearses=False)
        super().__init__(
            ModelRefusals(process, process.world.database),
            process.claims,
            process.blocked,
            self.prober,
            Quarantine(Everywhere(), process.blocked, process.clock),
            clock=process.clock,
            topic_of=_topic,
            jitter=_once,
            most_attempts=ATTEMPTS,
            retry_seconds=1.0,
            batch_bytes=1_000_000,
            blocks=process.world.blocks,
            on_dead_letter=process.tell,
        )


class Process(process.Process):
    """A relay that has taken the table.

    Args:
        who: the slot that it runs in.
        identity: unlike that of every process before; the same after it has started over.
    """

    def __init__(self, world: Any, who: int, identity: int) -> None:
        self.world = world
        self.who = who
        self.identity = identity
        self.plan = None
        self.in_settle = self.in_publish = self.is_stopped = False
        world.plan_for(self)
        self.clock = world.clock
        self.dead: set[int] = set()
        world.database.take(who, identity)
        self.producer = Producer(self, world.kafka, transactional=False)
        self.blocked = BlockedAggregates(self.clock)
        self.ledger = ModelLedger(self)
        self.batches = BatchQueue()
        self.claims = ModelClaims(self)
        self.publisher = Publisher(self.producer, self.blocked, patience=PATIENCE, clock=self.clock)
        self.retries: Any = ModelRetries(self)
        self.claimer = Claimer(
            self.claims,
            self.batches,
            self.ledger,
            self.blocked,
            self.retries,
            self.publisher.breaker,
            clock=self.clock,
            is_asked_to_stop=self.stopped,
            until_empty=world.until_empty,
            on_settled=self.ignore,
        )
        self.flow = Flow(
            self.publisher,
            self.batches,
            self.ledger,
            self.blocked,
            self.claimer,
            CrashGuard(0, (None, 0), mark=self.ignore, on_passed=self.ignore),
            clock=self.clock,
            is_stopped=self.claimer.is_stopped,
            until_empty=world.until_empty,
            on_complete=self.ignore,
        )
        self.claimer.begin()
        self.found = [seq for seq, _ in world.database.there("pending")]
        """What was pending at the beginning."""

    def tell(self, letter: DeadLetter) -> None:
        table, seq = self.world.database, letter.event.seq
        if seq in self.dead and not table.remembers:
            raise Broken("G4", f"event {seq} is a dead letter twice")
        self.dead.add(seq)
        table.told.add(seq)

    def waits(self) -> bool:
        """Whether something goes on when time passes."""
        now = self.clock()
        return self.publisher.breaker.state is not State.CLOSED or any(
            entry.due is not None and now < entry.due < float("inf")
            for entry in self.blocked.aggregates.values()
        )

    def settle_once(self, *, last: bool = False) -> None:
        """The claiming thread: one round."""
        if self.in_settle:
            raise ImpossibleError
        self.in_settle = True
        self.claimer.settle()
        if not last:
            self.claimer.advance()
            was_claiming = not self.claimer.is_settled
            self.claimer.claim()
            is_empty = was_claiming and self.claimer.is_settled and not self.claimer.is_stopped()
            if is_empty and not self.retries.is_settled:
                raise Broken("until empty", "it ends while something is tried or due")
        self.in_settle = False

    def end(self, *, failed: bool = False, settler_failed: bool = False) -> None:
        """What a worker does when a thread has failed, or all is done."""
        claims_failed = (failed or settler_failed) and self.in_settle
        failed = failed or settler_failed
        self.in_settle = self.in_publish = False
        if not claims_failed:
            try:
                self.settle_once(last=True)
            except ShardLostError:
                failed = True
        if not failed:
            # It waits for the answers to what was sent.
            self.retries.prober.answer()
        with suppress(ShardLostError, MarkError):
            self.retries.close()
        self.publisher.discard()
        self.world.database.release(self.who)
        if self.world.until_empty and not failed and not self.claimer.is_stopped():
            self._check_all()

    def _check_all(self) -> None:
        """A run until empty is over: what it has found is published, or waits behind what is not."""
        for seq, _ in self.world.database.there("pending"):
            event = self.world.database.event(seq)
            if (
                seq in self.found
                and (event.aggregate_type, event.aggregate_id) not in self.blocked.aggregates
            ):
                raise Broken("until empty", f"event {seq} is left")

    def key(self) -> Key:
        now, claims, retries, flow = self.clock(), self.claims, self.retries, self.flow
        return (
            tuple(process._batch(batch) for batch in self.batches._waiting),
            tuple(process._delivery(delivery) for delivery in self.publisher._deliveries),
            process._breaker(self.publisher.breaker, now),
            self.publisher._unexplained,
            self.publisher._progress == (self.publisher._completed, self._acknowledged()),
            self.producer.has_failed,
            tuple(process._complete(batch) for batch in self.ledger._completed),
            tuple(
                (tuple(name), entry.in_flight, process._due(entry.due, now), entry.busy)
                for name, entry in self.blocked.aggregates.items()
            ),
            self.blocked._next <= now,
            (flow._reading, flow._stop_by <= now),
            (self.is_stopped, self.claimer.broken is None, self.claimer._is_claiming),
            tuple(
                (
                    claims.claimed - claim.number,
                    tuple(event.seq for event in claim.batch.events),
                    claim.rows.session,
                    claim.is_locked,
                    now - claim.at > PATIENCE,
                )
                for claim in claims.in_flight
            ),
            (claims._is_more, claims._is_rehearsed, claims.sessions.key(), claims.upto),
            (tuple(sorted(claims.passed_over)), tuple(sorted(self.dead))),
            tuple(
                (name, trial.seq, trial.is_suspect, trial.attempts, trial.due <= now)
                for name, trial in retries._trials.items()
            ),
            tuple(retries._ended.items()),
            tuple(
                (claims.claimed - number, tuple(event.seq for event in events))
                for number, events in retries._put_back
            ),
            retries.prober.key(),
            tuple(self.found) if self.world.until_empty else (),
        )

    def _acknowledged(self) -> int:
        deliveries = self.publisher._deliveries
        return deliveries[0].acknowledged if deliveries else 0
