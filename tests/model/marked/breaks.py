"""Deliberate breaks of the core of a marked table's relay; the model has to find every one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from outbox_pipelines.core.event import Event
from outbox_pipelines.existing.core.claimer import Claimer
from outbox_pipelines.existing.core.claims import Claim, Claims, LockedError, Rows, Wanted
from outbox_pipelines.existing.core.row_retries import RowRetries, _of
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.ledger import Ledger
from outbox_pipelines.relay.core.parked import Tried, Verdict
from tests.model.explore import Result, explore
from tests.model.marked import table
from tests.model.marked.world import Marked
from tests.model.relay.breaks import Break, Patch

BREAKS: Final[dict[str, Break]] = {}
_STATES: Final = 30_000


def found(one: Break, patch: Patch) -> Result:
    """Explore a world whose core is broken, until something is found."""
    one.apply(patch)
    return explore(Marked(one.writers, **one.world), states=_STATES)


def _break(about: str, *writers: str, **world: Any) -> Callable[[Callable[[Patch], None]], None]:
    def kept(apply: Callable[[Patch], None]) -> None:
        chosen = {"faults": 0, "switches": 0} | world
        BREAKS[apply.__name__] = Break(about, apply, writers or ("ab", "a"), chosen)

    return kept


def _nothing(self: object, *_: object, **__: object) -> None: ...


# --- claims -------------------------------------------------------------------------------------------------


@_break("relays that share a table let their claims go", "a", is_shared=True, slots=2, faults=1)
def lets_go_of_shared(patch: Patch) -> None:
    let_go = Claims.let_go

    def unlocked(self: Claims) -> None:
        self._is_shared = False
        let_go(self)

    patch(Claims, "let_go", unlocked)


@_break("a row that another session has locked is skipped", "aa", locks=1)
def passes_over(patch: Patch) -> None:
    def claim(self: table.ModelSessions, wanted: Wanted) -> Rows:
        with self._process.call("claim"):
            content = self._table.content
            seqs = [seq for seq in self._wanted(wanted) if content[seq].lock is None]
            session = self._free.pop(0)
            for seq in seqs:
                content[seq].lock = self._who, session
        return Rows([self._table.event(seq) for seq in seqs], len(seqs), False, session)

    patch(table.ModelSessions, "claim", claim)


@_break("only the locked row is left out, not its aggregate", "aa", locks=1)
def leaves_out_a_row(patch: Patch) -> None:
    def claim(self: Claims, blocked: Any) -> Claim | None:
        busy = [event.seq for claim in self.in_flight for event in claim.batch.events]
        wanted = Wanted([*busy, *self.passed_over], frozenset(blocked), None)
        try:
            rows = self._sessions.claim(wanted)
        except LockedError:
            content = self._sessions._table.content  # type: ignore[attr-defined]
            locked = [seq for seq, row in content.items() if row.lock is not None]
            rows = self._sessions.claim(Wanted([*wanted.not_seqs, *locked], wanted.not_of, None))
        return self._begun(rows)

    patch(Claims, "claim", claim)


@_break("rows of a blocked aggregate are claimed", "aa", refuses=[1], repairs=1)
def claims_blocked(patch: Patch) -> None:
    claim = Claims.claim
    patch(Claims, "claim", lambda self, blocked: claim(self, ()))


@_break("a claim is marked as a whole", "ab", refuses=[1])
def marks_all(patch: Patch) -> None:
    settle = Claims.settle

    def settled(self: Claims, claim: Claim, published: list[Event]) -> None:
        settle(self, claim, claim.batch.events)

    patch(Claims, "settle", settled)


@_break("nothing of a claim is marked where something of it was refused", "ab", refuses=[1])
def marks_none(patch: Patch) -> None:
    settle = Claims.settle

    def settled(self: Claims, claim: Claim, published: list[Event]) -> None:
        settle(self, claim, published if len(published) == len(claim.batch.events) else [])

    patch(Claims, "settle", settled)


@_break("a claim that has lost its locks is forgotten", "aa", faults=1)
def forgets_unlocked(patch: Patch) -> None:
    def let_go(self: Claims) -> None:
        for claim in list(self.in_flight):
            if claim.is_locked and self._clock() - claim.at > self._most_seconds:
                self._sessions.unlock(claim.rows)
                self.in_flight.remove(claim)

    patch(Claims, "let_go", let_go)


@_break("claims are settled in another order", "abc", batch_events=1)
def settles_backwards(patch: Patch) -> None:
    take = Ledger.take

    def taken(self: Ledger) -> Any:
        batches, orders = take(self)
        return batches[::-1], orders

    patch(Ledger, "take", taken)


# --- rows that cannot be marked -----------------------------------------------------------------------------


@_break("rows are published although some cannot be marked", "a", "ab", unmarkable=[2], batch_events=1)
def goes_on(patch: Patch) -> None:
    # Its name is that of the method: the flow's state is pickled with it.
    def is_stopped(self: Claimer) -> bool:
        return self._is_asked_to_stop()

    patch(Claimer, "is_stopped", is_stopped)


@_break("the first claim is not rehearsed", "ab", unmarkable=[1])
def rehearses_nothing(patch: Patch) -> None:
    patch(table.ModelSessions, "rehearse", _nothing)


@_break("rows beside one that cannot be marked are not marked", "a", "bc", unmarkable=[2], repairs=1)
def marks_nothing_beside(patch: Patch) -> None:
    patch(table.ModelSessions, "mark_what_can_be", _nothing)


_ALONE: Final[dict[str, Any]] = {"unmarkable": [2], "refuses": [2], "repairs": 1, "batch_events": 1}


@_break("a row that cannot be marked is published alone", "b", "a", **_ALONE)
def tries_unmarkable(patch: Patch) -> None:
    patch(table.ModelRefusals, "rehearse", _nothing)


# --- what was refused ---------------------------------------------------------------------------------------


@_break("a later event of an aggregate takes the place of its first", "aa", refuses=[1, 2], batch_events=1)
def takes_a_later_head(patch: Patch) -> None:
    settled = RowRetries.settled

    def wrong(self: RowRetries, complete: Complete) -> None:
        for event in complete.parked_events():
            self._trials.pop((event.aggregate_type, event.aggregate_id), None)
        settled(self, complete)

    patch(RowRetries, "settled", wrong)


@_break(
    "an aggregate is looked after while rows of it are in flight",
    "aaa",
    refuses=[1],
    repairs=1,
    batch_events=1,
    faults=1,
)
def looks_after_early(patch: Patch) -> None:
    advance = RowRetries.advance

    def early(self: RowRetries, *, may_try: bool) -> None:
        self._put_back = type(self._put_back)((-1, events) for _, events in self._put_back)
        advance(self, may_try=may_try)

    of_process = Marked._of_process

    def only_stalls(self: Marked, n: int, process: Any) -> Any:
        faults = {"fault", "kill", "lose session"}
        return [each for each in of_process(self, n, process) if each[0] not in faults]

    patch(RowRetries, "advance", early)
    # Of all faults, a stall of Kafka is what shows it.
    patch(Marked, "_of_process", only_stalls)


@_break("what is pending again is not looked after", "a", refuses=[1])
def forgets_put_back(patch: Patch) -> None:
    settled = RowRetries.settled

    def forgets(self: RowRetries, complete: Complete) -> None:
        settled(self, complete)
        self._put_back.clear()

    patch(RowRetries, "settled", forgets)


def _with_verdict(patch: Patch, change: Callable[[Tried], Tried]) -> None:
    record = RowRetries._record
    patch(RowRetries, "_record", lambda self, tried: record(self, [change(one) for one in tried]))


@_break("no answer counts as published", "a", refuses=[1], repairs=1, faults=1)
def no_answer_is_published(patch: Patch) -> None:
    def optimistic(one: Tried) -> Tried:
        return Tried(one.attempt, Verdict.PUBLISHED) if one.verdict is Verdict.UNKNOWN else one

    _with_verdict(patch, optimistic)


@_break("an outage counts as an attempt", "a", refuses=[1], faults=1)
def counts_outages(patch: Patch) -> None:
    go_on = RowRetries._go_on

    def counted(self: RowRetries, tried: Tried, pause: float) -> None:
        go_on(self, tried, pause)
        if tried.verdict is Verdict.UNKNOWN:
            self._trials[_of(tried)].attempts += 1

    patch(RowRetries, "_go_on", counted)


@_break("a dead letter an attempt too early", "a", refuses=[1])
def gives_up_early(patch: Patch) -> None:
    attend = RowRetries._attend

    def early(self: RowRetries, aggregates: Any) -> None:
        self._most_attempts = 1
        attend(self, aggregates)

    patch(RowRetries, "_attend", early)


@_break("a refused event is released so that its aggregate continues", "aa", refuses=[1], repairs=1)
def overtakes_the_refused(patch: Patch) -> None:
    def go_on(self: RowRetries, tried: Tried, pause: float) -> None:
        event = tried.attempt.event
        if tried.verdict is Verdict.REFUSED:
            self._claims.passed_over.add(event.seq)
        self._free((event.aggregate_type, event.aggregate_id))

    patch(RowRetries, "_go_on", go_on)


@_break("verdicts are not recorded when the relay ends", "a", refuses=[1], repairs=1, stops=1, slots=2)
def drops_verdicts(patch: Patch) -> None:
    patch(RowRetries, "close", _nothing)


@_break("an aggregate does not wait for its dead letter", "aa", refuses=[1], blocks=True)
def blocks_nothing(patch: Patch) -> None:
    give_up = RowRetries._give_up

    def given_up(self: RowRetries, letter: Any) -> None:
        self._blocks = False
        give_up(self, letter)

    patch(RowRetries, "_give_up", given_up)


@_break("a predecessor's dead letters block nothing", "aa", refuses=[1], blocks=True, stops=1)
def forgets_the_dead(patch: Patch) -> None:
    patch(table.ModelRefusals, "failed", lambda self: ())


@_break("an aggregate waits for a dead letter that was deleted", "aa", refuses=[1], blocks=True, commands=1)
def waits_for_the_deleted(patch: Patch) -> None:
    patch(table.ModelRefusals, "still_failed", lambda self, aggregates: list(aggregates))


@_break("a dead letter of which the table says nothing is claimed again", "a", refuses=[1], remembers=False)
def claims_the_dead(patch: Patch) -> None:
    give_up = RowRetries._give_up

    def given_up(self: RowRetries, letter: Any) -> None:
        give_up(self, letter)
        self._claims.passed_over.clear()

    patch(RowRetries, "_give_up", given_up)


# --- until empty --------------------------------------------------------------------------------------------

_EMPTY: Final = partial(_break, until_empty=True)


@_EMPTY("a run until empty ends while another session has locked a row", "a", locks=1)
def ends_locked_out(patch: Patch) -> None:
    def is_empty(self: Claimer) -> bool:
        return not self._claims.in_flight and self._retries.is_settled

    patch(Claimer, "_is_empty", is_empty)


@_EMPTY("a run until empty ends while a refused event is tried", "aa", refuses=[1], repairs=1)
def ends_too_early(patch: Patch) -> None:
    def is_empty(self: Claimer) -> bool:
        return not self._claims.in_flight and not self._claims.was_locked_out

    patch(Claimer, "_is_empty", is_empty)
