"""The relay of a marked table: claim → encode → publish → mark, in two threads around the core.

Invariants:
- One thread claims, marks, and retries refused events; the calling thread publishes. A third thread only
  sends heartbeats, so that a slow statement does not lose the table. `relay.shared` contains what they share.
- The first failure in any thread ends all and is raised to the caller. Rows in flight are pending again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from outbox_pipelines.existing import existing_sql
from outbox_pipelines.existing.claim_sessions import MarkedTableSource, names
from outbox_pipelines.existing.core.claimer import Claimer
from outbox_pipelines.existing.refused_rows import MarkedTableRetries
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.quality.measurements import CAP
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.crash_guard import CrashGuard
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.lease.shard import Settled
from outbox_pipelines.relay.run import Run, Totals
from outbox_pipelines.relay.shared import SharedBatchQueue, SharedBlockedAggregates, SharedLedger, Threads
from outbox_pipelines.settings import ProcessSettings

_PROGRESS_EVERY: Final = 1.0


class MarkedTableWorker:
    """Relays an owned table until it is stopped."""

    def __init__(
        self,
        settings: ProcessSettings,
        ownership: TableOwnership,
        producer: IdempotentProducer,
        blocked: SharedBlockedAggregates,
        run: Run,
    ) -> None:
        self._run = run
        self._heartbeat = settings.lease_seconds / 5
        self._ownership = ownership
        self._producer = producer
        self._publisher = publisher = Publisher(
            producer, blocked, patience=settings.breaker_seconds, clock=time.monotonic
        )
        self._blocked = blocked
        self._source = MarkedTableSource(settings, ownership)
        self._retries = MarkedTableRetries(
            settings,
            ownership,
            self._source,
            blocked,
            topics=producer.lookups,
            schema_ids=producer.schema_ids,
            on_dead_letter=run.on_dead_letter,
        )
        self._ledger = SharedLedger()
        batches = SharedBatchQueue(run.host.patience)
        self._claimer = Claimer(
            self._source,
            batches,
            self._ledger,
            blocked,
            self._retries,
            publisher.breaker,
            clock=time.monotonic,
            is_asked_to_stop=run.stop.is_set,
            until_empty=run.until_empty,
            on_settled=self._count,
        )
        self._flow = Flow(
            publisher,
            batches,
            self._ledger,
            blocked,
            self._claimer,
            CrashGuard(0, (None, 0), mark=lambda seq: None),
            clock=time.monotonic,
            is_stopped=self._claimer.is_stopped,
            until_empty=run.until_empty,
            on_complete=run.metrics.acknowledged,
            report_poll=run.host.report_poll,
        )
        self._started = time.monotonic()
        self._end = threading.Event()
        self._threads = Threads()
        self._shown = State.CLOSED
        self._progress_at = 0.0
        self._progress: deque[int] = deque()
        self.totals = Totals()

    def run(self) -> Totals:
        """Relay the table; return when all claimed rows are published or pending again, and settled.

        Raises:
            ShardLostError: the table or the connection to the database is lost.
            MarkError: the table does not allow published rows to be marked.
            UnavailableError: with `until_empty`, Kafka has been unavailable for too long.
        """
        threads: list[threading.Thread] = []
        try:
            self._source.sessions.rehearse_rights()
            self._claimer.begin()
            threads.append(self._threads.start(self._claim, "outbox-claims"))
            threads.append(self._threads.start(self._beat, "outbox-beat"))
            while self._threads.failure is None and self._flow.step():
                self._report()
        except BaseException as error:  # noqa: BLE001 - raised below, when the threads have ended
            self._threads.fail(error)
        finally:
            self._ledger.finish()
            if threads:
                threads[0].join()
            failed = self._threads.failure is not None
            self._threads.guard(lambda: self._retries.close_prober(failed=failed))
            self._retries.close_commands()
            self._publisher.discard()
            # The heartbeats end last: until here Kafka's client may still send.
            self._end.set()
            for thread in threads:
                thread.join()
            self._source.sessions.close()
        self._report(last=True)
        self.totals.events += self._retries.published
        self.totals.seconds = time.monotonic() - self._started
        if failure := self._threads.failure or self._claimer.broken:
            raise failure
        self._count_unpublished()
        return self.totals

    def _claim(self) -> None:
        """Run the claiming thread."""
        has_claimed = False
        while True:
            is_last = self._ledger.wait_for_work(0.0 if has_claimed else self._claimer.rest)
            self._claimer.settle()
            self._tell()
            if is_last:
                return
            self._claimer.advance()
            if self._run.must_hand_over(self._ownership, self._started):
                self._run.stop.set()
            has_claimed = self._claimer.claim()

    def _beat(self) -> None:
        while not self._end.wait(self._heartbeat):
            self._ownership.beat()
            self._source.sessions.beat()

    def _count(self, published: int) -> None:
        self.totals.events += published
        self._progress.append(published)

    def _report(self, *, last: bool = False) -> None:
        if self._progress and (last or time.monotonic() - self._progress_at >= _PROGRESS_EVERY):
            events = sum(self._progress.popleft() for _ in range(len(self._progress)))
            self._progress_at = time.monotonic()
            self._run.on_progress(Settled(events, None, self._producer.topics))

    def _tell(self) -> None:
        """Show the state of the connection to Kafka in the database and the log, if it has changed."""
        breaker = self._publisher.breaker
        if breaker.state is not self._shown:
            self._shown = breaker.state
            self._run.metrics.breaker(breaker.state)
            self._ownership.show_kafka(breaker)

    def _count_unpublished(self) -> None:
        """Count what a run until empty leaves unpublished: blocked events and dead letters."""
        if not self._run.until_empty:
            return
        # From the table, where it records them: an earlier process may have given events up.
        self.totals.unpublished = self._retries.dead
        if self._ownership.mapping.remembers_failures:
            ((failed,),) = self._ownership.execute(
                self._ownership.statements(existing_sql.FAILURES), {"cap": CAP}
            )
            self.totals.unpublished = failed
        if self._blocked.aggregates:
            query = self._ownership.statements(
                existing_sql.UNPUBLISHED, existing_sql.AMONG, existing_sql.UP_TO
            )
            parameters = names(self._blocked.aggregates) | {"last": self._source.upto}
            ((held,),) = self._ownership.execute(query, parameters)
            self.totals.unpublished += held
