"""What is expected of an outbox: one table, from which the status, the checks and the alerts are made.

Invariants:
- A rule's name is that of its check, its alert and its chapter in docs/operating.md.
- A result depends on the measurements and the settings alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final

from outbox_pipelines.config import parsed
from outbox_pipelines.config.thresholds import LIMITS
from outbox_pipelines.core.text import size
from outbox_pipelines.quality.measurements import CAP, Measurements, age
from outbox_pipelines.settings import CheckSettings

_PACKAGE: Final = Path(__file__).parents[1]
# In a checkout the page is where the other pages are.
_PLACES: Final = (_PACKAGE / "operating.md", _PACKAGE.parent / "docs" / "operating.md")
_LINK: Final = re.compile(r"\[([^\]]+)\]\((#?[^)]*)\)")
_RUNBOOK: Final = "docs/operating.md"
OF_CONNECTOR: Final = frozenset(("connector", "connector_lag"))
"""The rules that apply with OUTBOX_CONNECT_URL only."""
OF_TABLES: Final = OF_CONNECTOR | {"lag", "backlog", "dead_letters", "shards_relayed", "kafka"}
"""The rules that apply to an existing table (OUTBOX_TABLE): it has no days, keys or parked events."""


def chapter_text(name: str) -> str:
    """Return a check's chapter as Markdown; empty if there is none."""
    return _chapters().get(name, "")


@cache
def _chapters() -> dict[str, str]:
    page = next((place for place in _PLACES if place.is_file()), None)
    if page is None:
        return {}
    found = {}
    for section in re.split(r"^#{2,3} ", page.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        # Links of the page lead nowhere without it.
        found[title.strip()] = _LINK.sub(_words, text).strip()
    return found


def _words(link: re.Match[str]) -> str:
    text, address = link.groups()
    return link[0] if address.startswith("https://") else text


def chapter(settings: CheckSettings, name: str) -> str:
    """Return where a check is explained: an address if OUTBOX_RUNBOOK_URL is set."""
    return f"{settings.runbook_url or _RUNBOOK}#{name}"


class Status(IntEnum):
    """Severity."""

    OK = 0
    WARN = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """An expectation, and what to do when it is not met."""

    name: str
    value: Callable[[Measurements], float]
    says: str
    """The measurement in words, with ``{}`` for its value, and ``{s}`` for the letter of a plural."""
    why: str
    """What a failure means, and why it matters."""
    help: str
    """What to run, or to look at."""
    warn: float | None = None
    """From this value on it is a warning; None for never."""
    error: float | None = None
    """From this value on a person must act; None for never."""
    is_least: bool = False
    """Whether values *below* the limits are bad, rather than those that reach them."""
    show: Callable[[float], str] = "{:,.0f}".format


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a rule for an outbox."""

    rule: Rule
    status: Status
    value: float
    detail: str = ""

    @property
    def text(self) -> str:
        """Return the result as a sentence."""
        said = self.rule.says.format(self.rule.show(self.value), s="" if self.value == 1 else "s")
        return f"{said} ({self.detail})" if self.detail else said


_WITHOUT_LIMITS: Final = (
    Rule(
        "lag",
        lambda found: found.oldest_unpublished_seconds,
        "oldest unpublished event: {}",
        why="Events are published within milliseconds of their commit. An old unpublished event means that "
        "no relay is active, that Kafka is unavailable, or that the relay cannot keep up.",
        help="Run `outbox status`: it shows the owner of each shard and whether Kafka is reachable",
        show=age,
    ),
    Rule(
        "backlog",
        lambda found: found.unpublished,
        f"{{}} unpublished event{{s}} (counting stops at {CAP:,})",
        why="An application may write more events at once than are published in a second; a relay drains "
        "some hundred thousand a second. A backlog that does not shrink has a cause: see the check "
        "`lag` for its age.",
        help="Check the rate in `outbox status`: a shrinking backlog needs no action",
    ),
    Rule(
        "blocked_aggregates",
        lambda found: found.blocked_aggregates,
        "{} aggregate{s} blocked by a refused event",
        why="Kafka or the encoder refused an event. It is retried automatically, OUTBOX_MAX_ATTEMPTS times, "
        "and the later events of its aggregate are parked behind it. All others are published.",
        help="`outbox status` shows the reason. Correct the topic or the event; the retry is automatic",
    ),
    Rule(
        "dead_letters",
        lambda found: found.dead_letters,
        "{} dead letter{s}",
        why="These events were refused OUTBOX_MAX_ATTEMPTS times, and no consumer has them. They are kept, "
        "even after their day is dropped, until they are replayed or discarded.",
        help="Run `outbox dead-letters list`, then `replay` or `discard`; or the job dead_letters",
    ),
    Rule(
        "delayed",
        lambda found: found.delayed_overdue_seconds,
        "oldest overdue delayed event: {}",
        why="A delayed event that is due is not in the outbox yet. Each active relay moves due events about "
        "once a second; without a relay (Debezium) `outbox delayed move` does. One with a reason is "
        "refused by the table, and tried again every minute.",
        help="Start `outbox relay`, or run `outbox delayed move`; `outbox delayed list` shows reasons",
        show=age,
    ),
    Rule(
        "replays",
        lambda found: found.replay_silent_seconds,
        "a replay has stood still for {}",
        why="The process of a replay reports once a second, also while it waits for Kafka. If it reports "
        "nothing, it was killed or hangs. Live events are not affected.",
        help="Re-execute its run in Dagster, or run `outbox replay --resume ID` or `outbox replay cancel ID`",
        show=age,
    ),
    Rule(
        "partitions_ahead",
        lambda found: found.partitions_ahead,
        "{} future day{s} with a partition",
        why="An insert into a day without a partition fails, and the business transaction with it. The "
        "hourly job maintain_partitions creates OUTBOX_PARTITIONS_AHEAD days; fewer mean that it has "
        "failed for days.",
        help="Run `outbox partitions ensure` or the job maintain_partitions; its error names the cause. If "
        "`outbox partitions list` shows a detached day, run `outbox partitions attach DAY`",
        is_least=True,
    ),
    Rule(
        "days_closed",
        lambda found: found.days_late.to_close,
        "{} day{s} not closed in time",
        why="A day that ended more than a day ago still accepts inserts, so it cannot be archived: a "
        "transaction of that day is still open or prepared, or events of that day are unpublished.",
        help="Run `outbox partitions close`: it names the obstacle",
    ),
    Rule(
        "days_archived",
        lambda found: found.days_late.to_archive,
        "{} day{s} not archived or not proven in time",
        why="A closed day still has no file one day after it could have been archived. The table keeps "
        "growing; nothing is lost, because no day is dropped without its archive. Or an archived day is "
        "not proven: the last proof has failed, or none has run for a day.",
        help="The failed run of archive_day, or `outbox archive day DAY`, names the cause",
    ),
    Rule(
        "days_dropped",
        lambda found: found.days_late.to_drop,
        "{} day{s} past the retention",
        why="They should have been dropped a day ago (OUTBOX_RETENTION_DAYS). Either their archive could "
        "not be proven equal, which needs a person, or a long transaction prevented the drop.",
        help="`outbox partitions drop --due`, or the failed run of drop_day, names the cause",
    ),
    Rule(
        "days_attached",
        lambda found: found.days_detached,
        "{} day{s} detached, with events that are not visible",
        why="A drop ended between detaching a partition and dropping it, or waits for a long transaction. "
        "The rows exist, but neither the table nor its view shows them.",
        help="`outbox partitions list` names them. Run `outbox partitions attach DAY`, or drop them",
    ),
    Rule(
        "shards_relayed",
        lambda found: found.unowned_seconds,
        "a shard without an active relay for {}",
        why="No relay owns the shard, so its events are not published. A successor takes over within "
        "seconds if one is started: as a service, or by the sensor relay_supervisor.",
        help="Start `outbox relay`, or turn on the sensor relay_supervisor",
        show=age,
    ),
    Rule(
        "kafka",
        lambda found: found.shards_without_kafka,
        "Kafka unreachable from {} relay{s}",
        why="Kafka has acknowledged nothing for OUTBOX_BREAKER_SECONDS, so the relay's breaker is open. It "
        "probes Kafka and continues automatically. No attempt is counted against an event, and "
        "nothing is lost.",
        help="Restore Kafka. Events stay in the table and are published automatically",
    ),
    Rule(
        "slot",
        lambda found: len(found.slot_problems),
        "{} problem{s} with the replication slot",
        why="Events are to be read from a slot (change data capture), and the slot is missing, lost or not "
        "read. The relay reads between snapshots until it can: no event is lost. Events wait only if the "
        "server waits for a standby before it delivers them.",
        help="Run `outbox cdc status`: it names each problem with its remedy",
    ),
    Rule(
        "slot_log",
        lambda found: found.slot_log[0],
        "the server keeps {} of its log for a slot",
        why="PostgreSQL keeps its log (WAL) until each slot has been read; without a limit it fills the "
        "disk. All slots of the database count, also those of Debezium and of subscriptions.",
        help="Start what reads the slot, or drop the slot: `outbox cdc drop`, or pg_drop_replication_slot",
        show=size,
    ),
    Rule(
        "connector",
        lambda found: len(found.connector_problems),
        "{} problem{s} with Debezium's connector",
        why="Debezium publishes the outbox from a Kafka Connect cluster (OUTBOX_CONNECT_URL), and its "
        "connector or task does not run. Events stay in the table and in the server's log until it does.",
        help="Run `outbox debezium status`: it names each problem with its remedy",
    ),
    Rule(
        "connector_lag",
        lambda found: found.unconfirmed_seconds,
        "oldest event that Debezium has not confirmed: {}",
        why="Workers confirm once a minute (offset.flush.interval.ms). A connector that does not, while "
        "newer events are committed, is stuck, even if it reports RUNNING: Kafka does not take its messages, "
        "the database does not send them, or an orphaned task keeps the slot.",
        help="Check that Kafka is available, then restart the process of the worker that `outbox debezium "
        "status` names",
        show=age,
    ),
    Rule(
        "old_transactions",
        lambda found: found.oldest_transaction_seconds,
        "oldest open transaction: {}",
        why="Its events are not committed, so they are not published. Its day cannot be closed, and dead "
        "rows stay in every table of the database until it ends. It does not slow relays.",
        help="End it: `SELECT pg_terminate_backend(PID)`, or ROLLBACK PREPARED",
        show=age,
    ),
    Rule(
        "idempotency_keys",
        lambda found: found.idempotency_keys,
        "about {} idempotency keys",
        why="Each key takes about 100 bytes with its index, and is removed when it is older than "
        "OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS. If far more are kept than are written in that time, the "
        "removal does not run.",
        help="Check that maintain_partitions succeeds; lower OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS",
    ),
)

RULES: Final = tuple(
    replace(rule, warn=warn, error=error) for rule in _WITHOUT_LIMITS for warn, error in [LIMITS[rule.name]]
)

_DETAILS: Final[dict[str, Callable[[Measurements], str | None]]] = {
    "partitions_ahead": lambda found: _each(shard.top_up_error for shard in found.shards),
    "shards_relayed": lambda found: _each(
        (
            found.waiting,
            None if found.has_ages else "how long is unknown without a created_at, and counts as an hour",
            *(
                f"the lock of shard {shard.shard} is held by {shard.intruder}"
                for shard in found.shards
                if shard.intruder
            ),
        )
    ),
    "blocked_aggregates": lambda found: _reasons(found.parked_reasons),
    "dead_letters": lambda found: _reasons(found.dead_letter_reasons),
    "delayed": lambda found: _reasons(found.delayed_reasons),
    "replays": lambda found: _each(
        each.line for each in found.replays if each.silent_seconds == found.replay_silent_seconds
    ),
    "kafka": lambda found: "; ".join(filter(None, (shard.breaker_reason for shard in found.shards))),
    "slot": lambda found: _each(found.slot_problems),
    "slot_log": lambda found: f"slot {found.slot_log[1]}",
    "connector": lambda found: _each(found.connector_problems),
    "old_transactions": lambda found: found.oldest_transaction,
}


def rules(settings: CheckSettings) -> list[Rule]:
    """Return the rules, with the thresholds of OUTBOX_WARN_AT and OUTBOX_ERROR_AT."""
    warn, error = parsed.thresholds(settings)

    def limited(rule: Rule) -> Rule:
        return replace(rule, warn=warn.get(rule.name, rule.warn), error=error.get(rule.name, rule.error))

    return [limited(rule) for rule in RULES if settings.connect_url or rule.name not in OF_CONNECTOR]


def judge(settings: CheckSettings, found: Measurements) -> list[CheckResult]:
    """Return the result of each rule that applies, in the order of `RULES`."""
    return [judge_one(rule, found) for rule in rules(settings) if found.has_days or rule.name in OF_TABLES]


def worst(results: Iterable[CheckResult]) -> Status:
    """Return the highest severity."""
    return max((result.status for result in results), default=Status.OK)


def judge_one(rule: Rule, found: Measurements) -> CheckResult:
    """Return the result of a rule."""
    value = float(rule.value(found))

    def is_bad(limit: float | None) -> bool:
        return limit is not None and (value < limit if rule.is_least else value >= limit)

    status = Status.ERROR if is_bad(rule.error) else Status.WARN if is_bad(rule.warn) else Status.OK
    detail = _DETAILS[rule.name](found) if status and rule.name in _DETAILS else None
    return CheckResult(rule, status, value, detail or "")


def _each(texts: Iterable[str | None]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _reasons(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count:,} × {reason}" for reason, count in reasons.items())
