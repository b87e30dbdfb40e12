"""What is expected of an outbox: one table, of which the status, the checks and the alerts are made.

Invariants:
- A rule's name is that of its check, its alert and its chapter in docs/operating.md.
- A verdict depends on the measurements and the settings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from outbox_pipelines.parsers.thresholds import read_thresholds
from outbox_pipelines.partitions import FEW_AHEAD
from outbox_pipelines.quality.measured import CAP, Measurements, age
from outbox_pipelines.settings import Settings

_RUNBOOK: Final = "docs/operating.md"


def chapter(settings: Settings, name: str) -> str:
    """Where people read what a check means and what helps: an address if the operator gave one."""
    return f"{settings.runbook_url or _RUNBOOK}#{name}"


class State(IntEnum):
    """How bad it is."""

    OK = 0
    WARN = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is expected, and what to do when it is not so."""

    name: str
    value: Callable[[Measurements], float]
    says: str
    """The measurement in words, with ``{}`` for its value."""
    why: str
    """What it means, and why it matters."""
    help: str
    """What to run, or to look at."""
    warn: float | None = None
    """From this value on it is a warning; None for never."""
    error: float | None = None
    """From this value on somebody must act; None for never."""
    is_least: bool = False
    """Whether values *below* the limits are bad, rather than those that reach them."""
    show: Callable[[float], str] = "{:,.0f}".format


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of an outbox."""

    rule: Rule
    state: State
    value: float
    detail: str = ""

    @property
    def text(self) -> str:
        """In a sentence."""
        said = self.rule.says.format(self.rule.show(self.value))
        return f"{said} ({self.detail})" if self.detail else said


RULES: Final = (
    Rule(
        "lag",
        lambda found: found.oldest_unpublished_seconds,
        "the oldest event that is not published is {} old",
        why="Events follow their commits within milliseconds. One that has waited for long means that "
        "no relay is at work, that Kafka is away, or that the relay cannot keep up.",
        help="`outbox status` says who relays each shard, and what it sees of Kafka",
        warn=15.0,
        error=60.0,
        show=age,
    ),
    Rule(
        "backlog",
        lambda found: found.unpublished,
        f"{{}} events wait to be published (counted up to {CAP:,})",
        why="A batch of an application may write more at once than goes out in a second; a relay drains "
        "some hundred thousand a second. A backlog that stays has a cause: see the check `lag` for "
        "its age.",
        help="look at the rate in `outbox status`: a backlog that shrinks needs nothing",
        warn=float(CAP),
    ),
    Rule(
        "blocked_aggregates",
        lambda found: found.blocked_aggregates,
        "{} aggregates wait behind an event that was refused",
        why="Kafka or the encoder refused an event; it is tried again by itself, OUTBOX_MAX_ATTEMPTS "
        "times, and the later events of its aggregate wait behind it. All others flow.",
        help="`outbox status` says why; mend the topic or the event, the retry comes by itself",
        warn=1.0,
        error=100.0,
    ),
    Rule(
        "dead_letters",
        lambda found: found.dead_letters,
        "{} events were given up",
        why="They were refused OUTBOX_MAX_ATTEMPTS times, and no consumer has them. They are kept, also "
        "after their day is dropped, until somebody replays or discards them.",
        help="`outbox dead-letters list`, then `replay` or `discard`; or the job dead_letters",
        error=1.0,
    ),
    Rule(
        "partitions_ahead",
        lambda found: found.days_ahead,
        "{} days ahead have a partition",
        why="An insert into a day without a partition fails, and the business transaction with it. The "
        "hourly job maintain_partitions makes OUTBOX_PARTITIONS_AHEAD days; fewer mean that it has "
        "failed for days.",
        help="`outbox partitions ensure`, or the job maintain_partitions, whose error says what is wrong",
        error=float(FEW_AHEAD),
        is_least=True,
    ),
    Rule(
        "days_closed",
        lambda found: found.days_late.to_close,
        "{} days should have been closed",
        why="A day that is over for more than a day still takes inserts, so that it cannot be archived: "
        "a transaction is open since then, a prepared one was forgotten, or events of that day are "
        "not published.",
        help="`outbox partitions close` says what stands against it",
        error=1.0,
    ),
    Rule(
        "days_archived",
        lambda found: found.days_late.to_archive,
        "{} days should have been archived",
        why="A closed day has no file yet, a day after it could have had one. The table grows "
        "meanwhile; nothing is lost, since no day is dropped without its archive.",
        help="the failed run of archive_day, or `outbox archive day DAY`, says why not",
        error=1.0,
    ),
    Rule(
        "days_dropped",
        lambda found: found.days_late.to_drop,
        "{} days are past the retention",
        why="They should have been dropped a day ago (OUTBOX_RETENTION_DAYS). Either their archive "
        "could not be proven equal, which needs a person, or a long transaction stood in the way.",
        help="`outbox partitions drop --due`, or the failed run of drop_day, says why they stay",
        warn=1.0,
        error=7.0,
    ),
    Rule(
        "days_attached",
        lambda found: found.days_detached,
        "{} days are detached: their events are not seen",
        why="A drop was killed between detaching a partition and dropping it, or a long transaction held it "
        "up. The rows are there, but neither the table nor its view shows them.",
        help="`outbox partitions list` names them; `outbox partitions attach DAY`, or drop them",
        error=1.0,
    ),
    Rule(
        "shards_relayed",
        lambda found: found.unowned_seconds,
        "a shard has been without a relay for {}",
        why="Nobody holds the shard, so that its events wait. A successor takes over within seconds "
        "where one is started: as a service, or by the sensor relay_supervisor.",
        help="start `outbox relay`, or turn the sensor relay_supervisor on",
        warn=15.0,
        error=30.0,
        show=age,
    ),
    Rule(
        "kafka",
        lambda found: found.shards_without_kafka,
        "{} relays find Kafka away",
        why="Kafka has acknowledged nothing for OUTBOX_BREAKER_SECONDS, so the relay's breaker is open: "
        "it probes, and goes on by itself. No attempt is counted against an event, and nothing is "
        "lost.",
        help="mend Kafka; events wait, and go out by themselves",
        error=1.0,
    ),
    Rule(
        "old_transactions",
        lambda found: found.oldest_transaction_seconds,
        "the oldest open transaction is {} old",
        why="Its events are not committed and so not published; its day cannot be closed; and dead rows "
        "stay in every table of the database until it ends. Relays are not slowed by it.",
        help="end it: `SELECT pg_terminate_backend(PID)`, or ROLLBACK PREPARED",
        warn=600.0,
        error=3600.0,
        show=age,
    ),
    Rule(
        "keys",
        lambda found: found.keys,
        "about {} idempotency keys are remembered",
        why="Each key takes some 100 bytes with its index, and they are removed when they are older "
        "than OUTBOX_KEY_RETENTION_DAYS. When far more are kept than are written in that time, nobody "
        "removes them.",
        help="see whether maintain_partitions succeeds; lower OUTBOX_KEY_RETENTION_DAYS",
        warn=50_000_000.0,
    ),
)

_DETAILS: Final[dict[str, Callable[[Measurements], str | None]]] = {
    "partitions_ahead": lambda found: _each(shard.top_up_error for shard in found.shards),
    "shards_relayed": lambda found: _each(
        f"the lock of shard {shard.shard} is held by {shard.intruder}"
        for shard in found.shards
        if shard.intruder
    ),
    "blocked_aggregates": lambda found: _reasons(found.parked_reasons),
    "dead_letters": lambda found: _reasons(found.dead_letter_reasons),
    "kafka": lambda found: "; ".join(filter(None, (shard.breaker_reason for shard in found.shards))),
    "old_transactions": lambda found: found.oldest_transaction,
}


def rules(settings: Settings) -> list[Rule]:
    """All rules, with the limits of OUTBOX_WARN_AT and OUTBOX_ERROR_AT."""
    warn, error = read_thresholds(settings.warn_at), read_thresholds(settings.error_at)

    def limited(rule: Rule) -> Rule:
        return replace(rule, warn=warn.get(rule.name, rule.warn), error=error.get(rule.name, rule.error))

    return [limited(rule) for rule in RULES]


def judge(settings: Settings, found: Measurements) -> list[Verdict]:
    """What each rule says, in the order of `RULES`."""
    return [judge_one(rule, found) for rule in rules(settings)]


def worst(verdicts: Iterable[Verdict]) -> State:
    """How bad it is altogether."""
    return max((verdict.state for verdict in verdicts), default=State.OK)


def judge_one(rule: Rule, found: Measurements) -> Verdict:
    """What this rule says."""
    value = float(rule.value(found))

    def is_bad(limit: float | None) -> bool:
        return limit is not None and (value < limit if rule.is_least else value >= limit)

    state = State.ERROR if is_bad(rule.error) else State.WARN if is_bad(rule.warn) else State.OK
    detail = _DETAILS[rule.name](found) if state and rule.name in _DETAILS else None
    return Verdict(rule, state, value, detail or "")


def _each(texts: Iterable[str | None]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _reasons(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count:,} × {reason}" for reason, count in reasons.items())
