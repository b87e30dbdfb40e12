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

from outbox_pipelines.partitions.calendar import FEW_AHEAD
from outbox_pipelines.quality.measurements import CAP, Measurements, age
from outbox_pipelines.settings import Settings


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
        "`outbox status` says who relays each shard, and what it sees of Kafka",
        warn=15.0,
        error=60.0,
        show=age,
    ),
    Rule(
        "backlog",
        lambda found: found.unpublished,
        f"{{}} events wait to be published (counted up to {CAP:,})",
        "look at the rate in `outbox status`: a backlog that shrinks needs nothing",
        warn=float(CAP),
    ),
    Rule(
        "blocked_aggregates",
        lambda found: found.blocked_aggregates,
        "{} aggregates wait behind an event that was refused",
        "`outbox status` says why; mend the topic or the event, the retry comes by itself",
        warn=1.0,
        error=100.0,
    ),
    Rule(
        "dead_letters",
        lambda found: found.dead_letters,
        "{} events were given up",
        "`outbox dead-letters list`, then `replay` or `discard`",
        error=1.0,
    ),
    Rule(
        "partitions_ahead",
        lambda found: found.days_ahead,
        "{} days ahead have a partition",
        "`outbox partitions ensure`, or the job maintain_partitions",
        error=float(FEW_AHEAD),
        is_least=True,
    ),
    Rule(
        "days_closed",
        lambda found: found.days_late.to_close,
        "{} days should have been closed",
        "`outbox partitions close` says what stands against it",
        error=1.0,
    ),
    Rule(
        "days_archived",
        lambda found: found.days_late.to_archive,
        "{} days should have been archived",
        "the failed run of archive_day, or `outbox archive day DAY`, says why not",
        error=1.0,
    ),
    Rule(
        "days_dropped",
        lambda found: found.days_late.to_drop,
        "{} days are past the retention",
        "`outbox partitions drop --due` says why they stay",
        warn=1.0,
        error=7.0,
    ),
    Rule(
        "shards_relayed",
        lambda found: found.unheld_seconds,
        "a shard has been without a relay for {}",
        "start `outbox relay`, or turn the sensor relay_supervisor on",
        warn=15.0,
        error=30.0,
        show=age,
    ),
    Rule(
        "kafka",
        lambda found: found.shards_without_kafka,
        "{} relays find Kafka away",
        "mend Kafka; events wait, and go out by themselves",
        error=1.0,
    ),
    Rule(
        "old_transactions",
        lambda found: found.oldest_transaction_seconds,
        "the oldest open transaction is {} old",
        "end it: its day cannot be closed, and dead rows stay",
        warn=600.0,
        error=3600.0,
        show=age,
    ),
    Rule(
        "keys",
        lambda found: found.keys,
        "about {} idempotency keys are remembered",
        "lower OUTBOX_KEYS_DAYS; the job maintain_partitions removes those that are older",
        warn=50_000_000.0,
    ),
)

_DETAILS: Final[dict[str, Callable[[Measurements], str | None]]] = {
    "blocked_aggregates": lambda found: _reasons(found.parked_reasons),
    "dead_letters": lambda found: _reasons(found.dead_letter_reasons),
    "kafka": lambda found: "; ".join(filter(None, (shard.breaker_reason for shard in found.shards))),
    "old_transactions": lambda found: found.oldest_transaction,
}


def rules(settings: Settings) -> list[Rule]:
    """All rules, with the limits of OUTBOX_WARN_AT and OUTBOX_ERROR_AT."""
    warn, error = read_limits(settings.warn_at), read_limits(settings.error_at)

    def limited(rule: Rule) -> Rule:
        return replace(rule, warn=warn.get(rule.name, rule.warn), error=error.get(rule.name, rule.error))

    return [limited(rule) for rule in RULES]


def read_limits(text: str) -> dict[str, float | None]:
    """The limits in ``lag=30,backlog=off``: by the name of the rule; None for off.

    Raises:
        ValueError: an unknown name, or no number.
    """
    limits: dict[str, float | None] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, limit = (part.strip() for part in item.partition("="))
        if name not in (names := [rule.name for rule in RULES]):
            raise ValueError(f"no check is named {name!r}: write NAME=LIMIT,… with {', '.join(names)}")
        try:
            limits[name] = None if limit == "off" else float(limit)
        except ValueError:
            raise ValueError(f"{item!r} has no limit: write {name}=NUMBER, or {name}=off") from None
    return limits


def judge(settings: Settings, found: Measurements) -> list[Verdict]:
    """What each rule says, in the order of `RULES`."""
    return [_judged(rule, found) for rule in rules(settings)]


def worst(verdicts: Iterable[Verdict]) -> State:
    """How bad it is altogether."""
    return max((verdict.state for verdict in verdicts), default=State.OK)


def _judged(rule: Rule, found: Measurements) -> Verdict:
    value = float(rule.value(found))

    def is_bad(limit: float | None) -> bool:
        return limit is not None and (value < limit if rule.is_least else value >= limit)

    state = State.ERROR if is_bad(rule.error) else State.WARN if is_bad(rule.warn) else State.OK
    detail = _DETAILS[rule.name](found) if state and rule.name in _DETAILS else None
    return Verdict(rule, state, value, detail or "")


def _reasons(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count:,} × {reason}" for reason, count in reasons.items())
