"""The outbox tables of other libraries: by which columns each is recognized, and which column is what.

Invariants:
- A table is recognized by its columns alone: its name is the user's, as is the spelling of its columns.
- A column that has one of our names comes before the library's: a person has added it.
- What a relay would lose, or could not read, is a refusal in one line, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.config.table_mapping import COLUMNS
from outbox_pipelines.existing.guesses import Guess, Guesses, normal
from outbox_pipelines.existing.pg_catalog import Column

PAGE: Final = "see docs/existing-tables.md#tables-of-other-libraries"
_ANOTHER: Final = f"let it publish what is left, and write new events to another table: {PAGE}"
# Entries for which a column with our name comes first. Not those that say what is pending.
_ADDED: Final = (
    *("seq", "aggregate_type", "aggregate_id", "event_type", "payload", "headers", "created_at"),
    *("failed_at", "retry_count", "last_error", "next_attempt_at"),
)


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table of one library. Its columns are named as `normal` returns them."""

    library: str
    """With the version whose table is meant."""
    has: frozenset[str]
    """The columns by which the table is recognized."""
    columns: dict[str, str] = field(default_factory=dict)
    """By entry."""
    states: dict[str, str] = field(default_factory=dict)
    """The values of the status; empty if a time says what is pending."""
    aggregate_type: str = "event"
    """For the entry in [table]; a class or a URN is no name of a topic."""
    missing: tuple[str, str, str] | None = None
    """A column that the user must add: its name, its definition, and why."""
    one_of: str | None = None
    """The column that says for which receiver a row is, if an event has one row for each."""
    refusal: str = ""
    """Why no relay can publish the table, and what to do."""


_SPRING: Final = {
    **{"id": "id", "aggregate_id": "id", "event_type": "eventtype", "payload": "serializedevent"},
    "created_at": "publicationdate",
}
_SPRING_HAS: Final = frozenset(
    {"listenerid", "eventtype", "serializedevent", "publicationdate", "completiondate"}
)
_CAP_HAS: Final = frozenset({"name", "content", "retries", "added", "expiresat", "statusname"})
_TRAM: Final = {
    **{"id": "id", "aggregate_id": "id", "event_type": "destination", "payload": "payload"},
    "status": "published",
}
_TRAM_HAS: Final = frozenset({"destination", "headers", "payload", "published", "creationtime"})
# No other value is pending for its reader, so 2 is failed for both.
_TRAM_STATES: Final = {"pending": "0", "processed": "1", "failed": "2"}
# The first that matches: of two versions, the one with more columns.
KNOWN: Final = (
    KnownTable(
        "Spring Modulith 2",
        _SPRING_HAS | {"status"},
        _SPRING | {"status": "status", "processed_at": "completiondate"},
        {"pending": "PUBLISHED", "processed": "COMPLETED", "failed": "FAILED"},
        one_of="listenerid",
    ),
    KnownTable(
        "Spring Modulith 1", _SPRING_HAS, _SPRING | {"published_at": "completiondate"}, one_of="listenerid"
    ),
    KnownTable(
        "namastack-outbox 1",
        frozenset(
            {"recordkey", "recordtype", "payload", "status", "failurecount", "partitionno", "handlerid"}
        ),
        # Not next_retry_at: it must not be null.
        {
            **{"id": "id", "aggregate_id": "recordkey", "event_type": "recordtype", "payload": "payload"},
            **{"status": "status", "processed_at": "completedat", "created_at": "createdat"},
            **{"retry_count": "failurecount", "last_error": "failurereason"},
        },
        {"pending": "NEW", "processed": "COMPLETED", "failed": "FAILED"},
        one_of="handlerid",
    ),
    KnownTable(
        "MassTransit 8",
        frozenset({"sequencenumber", "messageid", "body", "outboxid", "inboxmessageid", "messagetype"}),
        {
            **{"id": "messageid", "seq": "sequencenumber", "aggregate_id": "messageid"},
            **{"event_type": "messagetype", "payload": "body", "published_at": "publishedat"},
            **{"created_at": "senttime", "correlation_id": "correlationid"},
        },
        missing=(
            "published_at",
            "timestamptz",
            "which deletes what it has published, so that no row is marked",
        ),
    ),
    KnownTable(
        "CAP",
        _CAP_HAS | {"group"},
        refusal="with what it has received: describe its table published",
    ),
    KnownTable(
        "CAP 10",
        _CAP_HAS,
        {
            **{"id": "id", "seq": "id", "aggregate_id": "id", "event_type": "name", "payload": "content"},
            **{"status": "statusname", "retry_count": "retries", "created_at": "added"},
        },
        {"pending": "Scheduled", "processed": "Succeeded", "failed": "Failed"},
        aggregate_type="{event_type}",
    ),
    KnownTable(
        "Eventuate Tram with ids of the database",
        _TRAM_HAS | {"dbid"},
        _TRAM | {"id": "dbid", "seq": "dbid", "aggregate_id": "dbid"},
        _TRAM_STATES,
        aggregate_type="{event_type}",
    ),
    KnownTable(
        "Eventuate Tram",
        _TRAM_HAS,
        _TRAM,
        _TRAM_STATES,
        aggregate_type="{event_type}",
        missing=("created_at", "timestamptz NOT NULL DEFAULT now()", "in which no column orders the rows"),
    ),
    KnownTable(
        "django-outbox-pattern 3",
        frozenset({"destination", "body", "added", "expiresat", "retry", "status", "headers"}),
        {
            **{"id": "id", "aggregate_id": "id", "event_type": "destination", "payload": "body"},
            **{"status": "status", "retry_count": "retry", "created_at": "added", "headers": "headers"},
        },
        {"pending": "1", "processed": "2", "failed": "-1"},
    ),
    KnownTable(
        "Wolverine",
        frozenset({"ownerid", "destination", "deliverby", "body", "attempts", "messagetype"}),
        refusal=f"whose bodies are binary envelopes, and which deletes what it has sent: {_ANOTHER}",
    ),
    KnownTable(
        "NServiceBus",
        frozenset({"messageid", "dispatched", "dispatchedat", "persistenceversion", "operations"}),
        refusal=f"in which one row has all messages of a handler, as encoded bytes: {_ANOTHER}",
    ),
)


def recognize(columns: Iterable[Column]) -> KnownTable | None:
    """Return the library whose table has these columns."""
    names = {normal(each.name) for each in columns}
    return next((known for known in KNOWN if known.has <= names), None)


def entries(known: KnownTable, columns: Sequence[Column]) -> Guesses:
    """Return which column is what; without those that the table lacks."""
    by_name = {normal(each.name): each for each in columns}
    theirs = {ours: by_name[name] for ours, name in known.columns.items() if name in by_name}
    found: dict[str, Guess] = {}
    for ours in COLUMNS:
        added = by_name.get(normal(ours)) if ours in _ADDED else None
        column = added if added is not None and added.can_be(ours) else theirs.get(ours)
        if column is None:
            continue
        reason = f"{column.declared}, of {known.library}"
        if ours == "aggregate_id" and column is theirs.get("id"):
            reason = "no column has an aggregate: each event is its own, in no order with others"
        found[ours] = Guess(column.name, reason)
    used = {guess.name for guess in found.values()}
    return Guesses(found, {}, [each for each in columns if each.name not in used])
