"""What becomes of events that Kafka refused: tried alone, counted in their own columns, or given up.

Invariants:
- Everything here runs in the thread that claims and marks, and writes in the session that holds the table.
- Rows of a blocked aggregate are not claimed. It is looked after, and set free, only when every claim that
  was made before it was known to be blocked is settled: no row of it is on its way when another one goes.
- Only the first event of a blocked aggregate is tried; a verdict is written before anything else is done.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from outbox_pipelines.event import Event, weigh
from outbox_pipelines.relay.claims import queries
from outbox_pipelines.relay.claims.holder import Holder
from outbox_pipelines.relay.claims.marks import array, explained
from outbox_pipelines.relay.claims.source import ClaimSource, names
from outbox_pipelines.relay.core.attempts import Attempt, DeadLetter, Tried, Verdict
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.parking import LONGEST_PAUSE, MOMENT_SECONDS, Aggregate, ParkingLot
from outbox_pipelines.relay.core.quarantine import Quarantine
from outbox_pipelines.relay.dead_letter_runs import DeadLetterRuns, describe
from outbox_pipelines.relay.prober import Prober
from outbox_pipelines.relay.routing import Router
from outbox_pipelines.relay.topics import Topics
from outbox_pipelines.settings import Settings

_AT_ONCE: Final = 500
# A topic that is missing, or a Kafka that is away, is asked again after so long.
_TOPIC_SECONDS: Final = 10.0
_OUTAGE_SECONDS: Final = 1.0
# With OUTBOX_ON_DEAD_LETTER=block: whether somebody has mended the table.
_MENDED_SECONDS: Final = 2.0
# Dead letters that wait for the operator's command: in memory, since such a table has no place for it.
_MOST_COMMANDS: Final = 1000
_COMMANDS_SECONDS: Final = 10.0
_LOG: Final = logging.getLogger(__name__)

_EVENT: Final = len(Event._fields)


@dataclass(slots=True)
class _Trial:
    """The first event of a blocked aggregate."""

    seq: int
    is_suspect: bool
    """Else it only stands before one."""
    attempts: int = 0
    due: float = 0.0
    error: str = ""
    """As written into its row."""


class ClaimRetries:
    """Looks after the blocked aggregates of a table that has been taken."""

    def __init__(
        self,
        settings: Settings,
        holder: Holder,
        source: ClaimSource,
        lot: ParkingLot,
        *,
        topics: Topics,
        on_dead_letter: Callable[[DeadLetter], None],
    ) -> None:
        self._settings = settings
        self._holder = holder
        self._statements = holder.statements
        self._source = source
        self._lot = lot
        self._prober = Prober(settings, topics)
        self._router = Router(settings)
        self._quarantine = Quarantine(topics, lot, time.monotonic)
        self._on_dead_letter = on_dead_letter
        self._commands = DeadLetterRuns(settings.dead_letter_command.reveal(), most=_MOST_COMMANDS)
        self._blocks = settings.on_dead_letter == "block"
        self._trials: dict[tuple[str, str], _Trial] = {}
        self._ended: dict[tuple[str, str], int | None] = {}
        """Blocked for good by a dead letter, and its `seq` where only this process knows of it."""
        self._put_back: deque[tuple[int, list[Event]]] = deque()
        """Rows that are pending again, behind the last claim that may have had others of their aggregates."""
        self.published = 0
        """How many refused events have been published since."""
        self.dead = 0
        """How many were given up."""

    def begin(self) -> None:
        """Takes up what the predecessor left; to be called before anything is claimed."""
        now = time.monotonic()
        if self._statements.counts_attempts:
            for kind, name, seq, attempts, due_in in self._holder.execute(
                self._statements(queries.TRIED), {}
            ):
                self._trials[kind, name] = _Trial(seq, True, attempts, now + max(0.0, due_in))
        if self._blocks:
            for kind, name in self._holder.execute(self._statements(queries.FAILED), {}):
                self._ended[kind, name] = None
                self._trials.pop((kind, name), None)
        self._lot.load([*self._trials, *self._ended])

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, and nothing is due now."""
        is_quiet = self._quarantine.is_quiet and not (self._prober.is_busy or self._put_back)
        return is_quiet and self._lot.is_settled

    @property
    def pause(self) -> float:
        """How long until something may want attention, in seconds."""
        if self._prober.is_busy:
            return MOMENT_SECONDS
        return min(self._quarantine.pause, max(self._lot.next_due - time.monotonic(), 0.001))

    def settled(self, complete: Complete) -> None:
        """A claim is settled: what Kafka does not get now is pending again."""
        held = sorted(complete.held_back())
        self._bury(complete.dead)
        for event in held:
            if event.seq in complete.dead:
                continue
            aggregate = (event.aggregate_type, event.aggregate_id)
            trial = self._trials.get(aggregate)
            if aggregate not in self._ended and (trial is None or event.seq < trial.seq):
                self._trials[aggregate] = _Trial(event.seq, event.seq in complete.suspects)
        if held:
            self._put_back.append((self._source.claimed, held))

    def _bury(self, dead: Mapping[int, tuple[Event, str]]) -> None:
        """Writes down what could not be read. This process claims it no more, whatever the table says."""
        if not dead:
            return
        if self._statements.writes_refusals:
            count = len(dead)
            reasons = _texts({seq: reason for seq, (_, reason) in dead.items()})
            given = {"pauses": [0.0] * count, "lasts": [True] * count, **reasons}
            with explained(self._holder.mapping):
                self._holder.execute(self._statements(queries.REFUSED), given)
        for seq, (event, reason) in dead.items():
            self.dead += 1
            self._source.passed_over.add(seq)
            if self._blocks:
                self._ended[event.aggregate_type, event.aggregate_id] = seq
            self._on_dead_letter(DeadLetter(event, 0, reason))

    def look_after(self, *, may_try: bool) -> None:
        """One round: verdicts, what has been put back, what is due.

        Args:
            may_try: whether Kafka takes events.
        """
        self._record(self._prober.verdicts())
        in_flight = self._source.in_flight
        while self._put_back and not (in_flight and in_flight[0].number <= self._put_back[0][0]):
            self._lot.parked(self._put_back.popleft()[1])
        if not may_try or self._prober.is_busy:
            return
        self._quarantine.look()
        if aggregates := self._lot.due(_AT_ONCE):
            self._attend(aggregates)

    def close(self) -> None:
        """Stops trying; what is under way is tried again by whoever comes next."""
        self._prober.close()
        self._commands.wait(_COMMANDS_SECONDS)
        if left := self._commands.close():
            _LOG.error(
                "OUTBOX_DEAD_LETTER_COMMAND was not run for %d dead letters: the relay has ended", left
            )

    def _attend(self, aggregates: list[Aggregate]) -> None:
        now = time.monotonic()
        due: dict[int, Aggregate] = {}
        for aggregate in aggregates:
            trial = self._trials.get(aggregate)
            if aggregate in self._ended:
                continue
            if trial is not None and trial.is_suspect and trial.due > now:
                self._lot.look_again(aggregate, trial.due - now)
            elif trial is not None and trial.is_suspect:
                due[trial.seq] = aggregate
            else:
                # What stands before a suspect is claimed with it, as usual.
                self._free(aggregate)
        self._attend_ended([aggregate for aggregate in aggregates if aggregate in self._ended])
        self._try(due)

    def _try(self, due: dict[int, Aggregate]) -> None:
        if not due:
            return
        # Read anew: somebody may have mended, marked or deleted them.
        attempts = []
        held: dict[int, str] = {}
        size = 0
        for seq, row in self._holder.read(self._statements(queries.EVENTS), sorted(due)):
            if isinstance(row, str):
                # It is claimed once more, and found so there.
                continue
            if size > self._settings.piece_bytes:
                self._lot.look_again(due.pop(seq), MOMENT_SECONDS)
                continue
            event = Event._make(row[:_EVENT])
            size += weigh([event])
            if (event.aggregate_type, event.aggregate_id) != due[event.seq]:
                continue
            aggregate = due.pop(event.seq)
            trial = self._trials[aggregate]
            trial.attempts = max(trial.attempts, row[_EVENT])
            if (
                reason := self._quarantine.holds(
                    self._router.topic_or_empty(event.aggregate_type, event.event_type), aggregate
                )
            ) is not None:
                # Written down once: each change rewrites the row.
                if reason and trial.error != reason:
                    trial.error = held[event.seq] = reason
                continue
            if self._quarantine.has_cleared(aggregate) and not trial.attempts:
                # Its topic was to blame: it is claimed as usual.
                self._free(aggregate)
                continue
            is_last = trial.attempts + 1 >= self._settings.max_attempts
            attempts.append(Attempt(event, trial.attempts, is_last=is_last, is_replay=False))
        if held and self._statements.writes_errors:
            self._holder.execute(self._statements(queries.POSTPONED), _texts(held))
        for aggregate in due.values():
            self._free(aggregate)
        if attempts:
            self._prober.submit(attempts)

    def _attend_ended(self, aggregates: list[Aggregate]) -> None:
        """Those that wait behind a dead letter go on when the table has it no more."""
        if not aggregates:
            return
        rows = self._holder.execute(self._statements(queries.STILL_FAILED), names(aggregates))
        failed = {(kind, name) for kind, name in rows}
        for aggregate in aggregates:
            if aggregate in failed or self._ended[aggregate] is not None:
                self._lot.look_again(aggregate, _MENDED_SECONDS)
            else:
                del self._ended[aggregate]
                self._free(aggregate)

    def _free(self, aggregate: Aggregate) -> None:
        self._trials.pop(aggregate, None)
        self._quarantine.forget(aggregate)
        self._lot.free(aggregate)

    def _record(self, tried: list[Tried]) -> None:
        """Writes verdicts, then lets the aggregates be looked after again."""
        if not tried:
            return
        published = [one.attempt.event for one in tried if one.verdict is Verdict.PUBLISHED]
        refused = [one for one in tried if one.verdict is Verdict.REFUSED]
        postponed = [one for one in tried if one.verdict is Verdict.UNAVAILABLE and self._is_news(one)]
        pauses = {one.attempt.event.seq: self._pause(one) for one in tried}
        with explained(self._holder.mapping), self._holder.transaction():
            if published:
                self._source.mark(published)
            if refused and self._statements.writes_refusals:
                self._holder.execute(
                    self._statements(queries.REFUSED),
                    {
                        "pauses": [pauses[one.attempt.event.seq] for one in refused],
                        "lasts": [one.attempt.is_last for one in refused],
                        **_reasons(refused),
                    },
                )
            if postponed and self._statements.writes_errors:
                self._holder.execute(self._statements(queries.POSTPONED), _reasons(postponed))
        self.published += len(published)
        for one in tried:
            self._go_on(one, pauses[one.attempt.event.seq])

    def _go_on(self, tried: Tried, pause: float) -> None:
        """What a verdict that is written means for the aggregate."""
        event = tried.attempt.event
        aggregate = (event.aggregate_type, event.aggregate_id)
        trial = self._trials[aggregate]
        self._quarantine.judge(aggregate, tried.verdict)
        is_over = tried.verdict is Verdict.PUBLISHED
        if tried.verdict is Verdict.REFUSED:
            trial.attempts += 1
            if tried.attempt.is_last:
                is_over = True
                self._give_up(aggregate, tried)
        if is_over:
            del self._trials[aggregate]
            self._lot.look_again(aggregate)
        else:
            trial.due = time.monotonic() + pause
            if tried.verdict is not Verdict.UNKNOWN:
                trial.error = tried.reason
            self._lot.look_again(aggregate, pause)

    def _give_up(self, aggregate: tuple[str, str], tried: Tried) -> None:
        event = tried.attempt.event
        self.dead += 1
        is_remembered = self._holder.mapping.remembers_failures
        if not is_remembered:
            self._source.passed_over.add(event.seq)
        if self._blocks:
            self._ended[aggregate] = None if is_remembered else event.seq
        letter = DeadLetter(event, tried.attempt.attempts + 1, tried.reason)
        self._on_dead_letter(letter)
        self._commands.done()
        if self._commands.room > 0:
            said = describe(event, letter.attempts, letter.error, remedy="mend the row, make it pending")
            self._commands.submit(event.seq, said)
        elif self._settings.dead_letter_command:
            _LOG.error("OUTBOX_DEAD_LETTER_COMMAND is not run for %s: %d wait for it", event, _MOST_COMMANDS)

    def _is_news(self, tried: Tried) -> bool:
        """A topic that is missing for hours is written down once: each change rewrites the row."""
        event = tried.attempt.event
        return self._trials[event.aggregate_type, event.aggregate_id].error != tried.reason

    def _pause(self, tried: Tried) -> float:
        """Until the next attempt; with jitter, so that what was refused together does not stay together."""
        if tried.verdict is Verdict.UNKNOWN:
            return _OUTAGE_SECONDS
        if tried.verdict is Verdict.UNAVAILABLE:
            return _TOPIC_SECONDS
        pause = min(LONGEST_PAUSE, self._settings.retry_seconds * 2.0**tried.attempt.attempts)
        return pause * random.uniform(0.8, 1.2)


def _reasons(tried: Iterable[Tried]) -> dict[str, object]:
    return _texts({one.attempt.event.seq: one.reason for one in tried})


def _texts(reasons: dict[int, str]) -> dict[str, object]:
    # PostgreSQL's text has no NUL.
    return {"seqs": array(reasons), "errors": [reason.replace("\0", "") for reason in reasons.values()]}
