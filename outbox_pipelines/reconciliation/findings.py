"""What can be found, and where: each finding is a query, a word for it, and what to do.

Invariants:
- A finding without events is left out.
"""

from __future__ import annotations

from typing import Final

from outbox_pipelines.parsers.consumers_file import Consumer
from outbox_pipelines.quality.rules import State
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.reconciliation.processed import Handled
from outbox_pipelines.reconciliation.report import EXAMPLES, Example, Finding, Kind
from outbox_pipelines.reconciliation.workspace import Workspace

_OF_TOPICS: Final = (
    (
        queries.MISSING,
        Kind(
            "missing",
            State.ERROR,
            "counted as published, and in no topic",
            "was the topic made anew, or routed elsewhere? Send them again: docs/reconciliation.md, missing",
        ),
    ),
    (
        queries.PHANTOM,
        Kind(
            "phantom",
            State.ERROR,
            "messages of the day whose id no event has",
            "find out who else writes to the topic; the outbox never held them",
        ),
    ),
    (
        queries.OUT_OF_ORDER,
        Kind(
            "out_of_order",
            State.ERROR,
            "came behind a later event of their aggregate",
            "do writers lock the aggregate before they insert? docs/reconciliation.md, out_of_order",
        ),
    ),
    (
        queries.DUPLICATED,
        Kind(
            "duplicated",
            State.WARN,
            "messages too many: their event was there already",
            "usual after a crash with at_least_once; consumers pass over ids that they know",
        ),
    ),
    (
        queries.LAGGING,
        Kind(
            "lagging",
            State.WARN,
            "not published yet",
            "`outbox status` says why, and what helps; then run this again",
        ),
    ),
    (
        queries.UNREADABLE,
        Kind(
            "unreadable",
            State.WARN,
            "messages without an id that could be an event's",
            "find out who else writes to the topic, or mend OUTBOX_HEADER_NAMES",
        ),
    ),
    (
        queries.UNKNOWABLE,
        Kind(
            "unknowable",
            State.WARN,
            "published, and not in the topic any more, or not yet",
            "reconcile within the topic's retention; consumers' own rows are compared by what is left",
        ),
    ),
    (queries.LATE_REPLAYS, Kind("late_replays", State.OK, "dead letters that came late, when replayed")),
    (queries.DEAD, Kind("dead_letters", State.OK, "not published: `outbox dead-letters list` has them")),
    (queries.GIVEN_UP, Kind("discarded", State.OK, "not published: somebody gave them up")),
)

_OF_CONSUMER: Final = (
    (
        queries.NOT_HANDLED,
        Kind(
            "missing",
            State.ERROR,
            "in the topic and passed over: never recorded",
            "does it take these types and topics? Else set its group back: what it knows it skips",
        ),
    ),
    (
        queries.STRANGE,
        Kind(
            "phantom",
            State.ERROR,
            "recorded ids of the day that no event has",
            "who sent them? If its source handles other outboxes too: handles_others = true",
        ),
    ),
    (
        queries.CONSUMER_DEAD,
        Kind(
            "dead_letters",
            State.WARN,
            "received, and their handler failed for good",
            "mend the cause, then `outbox consumer dead-letters replay`, in its database",
        ),
    ),
    (
        queries.CONSUMER_LAGGING,
        Kind("lagging", State.WARN, "not handled yet", "is it running? Run this again when it has caught up"),
    ),
    (
        queries.FORGOTTEN,
        Kind(
            "forgotten",
            State.WARN,
            "cannot be told: rows of that time are pruned",
            "name keep_days if they are not; reconcile sooner than they are pruned",
        ),
    ),
    (queries.CONSUMER_GIVEN_UP, Kind("discarded", State.OK, "received, and given up by somebody")),
)


def of_topics(space: Workspace) -> list[Finding]:
    """What is not as it should be in the topics."""
    return [found for query, kind in _OF_TOPICS if (found := _find(space, query, kind)).count]


def of_consumer(space: Workspace, consumer: Consumer, handled: Handled) -> list[Finding]:
    """What is not as it should be with a consumer, whose tables are loaded."""
    given = {"{kept_ms}": str(handled.kept_ms), "{side}": side(consumer)}
    findings = []
    for query, kind in _OF_CONSUMER:
        filled = query
        for name, value in given.items():
            filled = filled.replace(name, value)
        if (found := _find(space, filled, kind)).count:
            findings.append(found)
    return findings


def side(consumer: Consumer) -> str:
    """What the table of unknown ids calls it."""
    return "consumer " + consumer.name.replace("'", "''")


def _find(space: Workspace, query: str, kind: Kind) -> Finding:
    amount = "extra" if query is queries.DUPLICATED else "1"
    (count,) = space.row(queries.COUNT.format(amount=amount, finding=query))
    examples = space.rows(queries.EXAMPLES.format(finding=query, limit=EXAMPLES)) if count else []
    return Finding(kind, count, [Example(*each) for each in examples])
