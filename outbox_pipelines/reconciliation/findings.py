"""The findings of a reconciliation: each is a query, a name, and what to do.

Invariants:
- A finding without events is omitted.
"""

from __future__ import annotations

from typing import Final

from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.reconciliation.processed import Handled
from outbox_pipelines.reconciliation.report import EXAMPLES, Example, Finding, Kind
from outbox_pipelines.reconciliation.workspace import Workspace

_OF_TOPICS: Final = (
    (
        queries.MISSING,
        Kind(
            "missing",
            Status.ERROR,
            "recorded as published, but not in any topic",
            "check whether the topic was recreated or rerouted, then resend: docs/reconciliation.md, missing",
        ),
    ),
    (
        queries.WRONG_TOPIC,
        Kind(
            "wrong_topic",
            Status.ERROR,
            "published, but in another topic than the settings name",
            "check OUTBOX_TOPIC and OUTBOX_TOPIC_MAP of the relay and of this command: "
            "docs/reconciliation.md, wrong_topic",
        ),
    ),
    (
        queries.PHANTOM,
        Kind(
            "phantom",
            Status.ERROR,
            "messages of the day whose id belongs to no event",
            "find the other producer of the topic; after a failover or a restore, the database has lost "
            "these events: docs/reconciliation.md, phantom",
        ),
    ),
    (
        queries.OUT_OF_ORDER,
        Kind(
            "out_of_order",
            Status.ERROR,
            "published after a later event of their aggregate",
            "check that writers lock the aggregate before they insert: docs/reconciliation.md, out_of_order",
        ),
    ),
    (
        queries.DUPLICATED,
        Kind(
            "duplicated",
            Status.WARN,
            "extra messages: their event was already in the topic",
            "normal after a crash with at_least_once; idempotent consumers skip ids that they have processed",
        ),
    ),
    (
        queries.LAGGING,
        Kind(
            "lagging",
            Status.WARN,
            "not published yet",
            "run `outbox status` for the cause and the fix; then run this again",
        ),
    ),
    (
        queries.UNREADABLE,
        Kind(
            "unreadable",
            Status.WARN,
            "messages without a valid event id",
            "find the other producer of the topic, or correct OUTBOX_HEADER_NAMES",
        ),
    ),
    (
        queries.UNKNOWABLE,
        Kind(
            "unknowable",
            Status.WARN,
            "published, but no longer or not yet in the topic",
            "reconcile within the topic's retention; consumers are compared with the remaining messages",
        ),
    ),
    (queries.LATE_REPLAYS, Kind("late_replays", Status.OK, "dead letters published late, by a replay")),
    (queries.DEAD, Kind("dead_letters", Status.OK, "not published: see `outbox dead-letters list`")),
    (queries.GIVEN_UP, Kind("discarded", Status.OK, "not published: discarded by an operator")),
)

_OF_CONSUMER: Final = (
    (
        queries.NOT_HANDLED,
        Kind(
            "missing",
            Status.ERROR,
            "in the topic, but skipped: never recorded",
            "check the consumer's types and topics, then set its group's offsets back: "
            "recorded events are skipped",
        ),
    ),
    (
        queries.STRANGE,
        Kind(
            "phantom",
            Status.ERROR,
            "recorded ids of the day that belong to no event",
            "find the producer; if the source also handles other outboxes, set handles_others = true",
        ),
    ),
    (
        queries.CONSUMER_DEAD,
        Kind(
            "dead_letters",
            Status.WARN,
            "received, but all attempts of their handler failed",
            "fix the cause, then run `outbox consumer dead-letters replay` in the consumer's database",
        ),
    ),
    (
        queries.CONSUMER_LAGGING,
        Kind("lagging", Status.WARN, "not handled yet", "check that it runs; reconcile again later"),
    ),
    (
        queries.FORGOTTEN,
        Kind(
            "forgotten",
            Status.WARN,
            "cannot be verified: the consumer's rows of that time are pruned",
            "if they are not pruned, set keep_days; otherwise reconcile earlier, before they are pruned",
        ),
    ),
    (queries.CONSUMER_GIVEN_UP, Kind("discarded", Status.OK, "received, then discarded by an operator")),
)


def of_topics(space: Workspace) -> list[Finding]:
    """Return the findings of the topics."""
    return [found for query, kind in _OF_TOPICS if (found := _find(space, query, kind)).count]


def of_consumer(space: Workspace, consumer: Consumer, handled: Handled) -> list[Finding]:
    """Return the findings of a consumer, whose tables are loaded."""
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
    """Return the consumer's name in the table of unknown ids."""
    return "consumer " + consumer.name.replace("'", "''")


def _find(space: Workspace, query: str, kind: Kind) -> Finding:
    amount = "extra" if query is queries.DUPLICATED else "1"
    (count,) = space.row(queries.COUNT.format(amount=amount, finding=query))
    examples = space.rows(queries.EXAMPLES.format(finding=query, limit=EXAMPLES)) if count else []
    return Finding(kind, count, [Example(*each) for each in examples])
