"""Guesses which column of an outbox table is what; recognizes the tables of other libraries by their columns.

Invariants:
- Only `outbox table describe` guesses. The relay does what the file says that a person has checked.
- A column is guessed for one entry, except for an integer that is both id and seq.
- A library's table is recognized by its columns alone: its name is the user's, as is the spelling of its
  columns. A column that has one of our names comes before the library's: a person has added it.
- What a relay would lose, or could not read, is a refusal in one line, with what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.config.table_mapping import COLUMNS
from outbox_pipelines.existing.pg_catalog import NULLED, Column

_TIMES: Final = (
    *("publishedat", "sentat", "dispatchedat", "processedat", "deliveredat", "relayedat", "completedat"),
    *("publishedon", "senton", "dispatchedon", "processedon", "publisheddate", "processeddate"),
    *("publishedtime", "processedtime", "senttime", "handledat"),
)
# As `normal` returns them; the most likely one first.
_SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    "id": ("id", "eventid", "messageid", "outboxid", "eventuuid", "uuid", "guid"),
    "seq": ("seq", "sequence", "sequencenumber", "seqno", "seqnum", "position", "globalposition", "ordinal"),
    "aggregate_type": (
        *("aggregatetype", "aggregate", "aggregatename", "aggregateroottype", "aggregateroot"),
        *("entitytype", "entity", "entityname", "streamtype", "resourcetype"),
    ),
    "aggregate_id": (
        *("aggregateid", "aggregaterootid", "entityid", "streamid", "resourceid", "partitionkey"),
        *("messagekey", "eventkey", "key", "aggregate", "entity"),
    ),
    "event_type": ("eventtype", "type", "eventname", "messagetype", "event", "name", "kind"),
    "payload": (
        *("payload", "eventdata", "body", "data", "eventpayload", "eventbody", "messagebody", "content"),
        *("message", "json"),
    ),
    "status": ("status", "state", "eventstatus", "outboxstatus", "publishstatus", "processingstatus"),
    "published_at": _TIMES,
    "processed_at": _TIMES,
    "failed_at": ("failedat", "deadat", "deadletteredat", "failedon"),
    "retry_count": (
        *("retrycount", "attempts", "retries", "attemptcount", "retryattempts", "tries", "attempt"),
        *("deliveryattempts", "publishattempts", "failurecount", "errorcount"),
    ),
    "last_error": (
        *("lasterror", "error", "errormessage", "lasterrormessage", "failurereason", "errordetails"),
        *("exception", "failuremessage"),
    ),
    "next_attempt_at": ("nextattemptat", "nextretryat", "retryat", "nextretry", "nextattempt", "retryafter"),
    "created_at": (
        *("createdat", "occurredat", "createdon", "occurredon", "insertedat", "recordedat", "createddate"),
        *("creationdate", "createdtime", "eventtime", "eventtimestamp", "timestamp", "created", "ts"),
    ),
    "headers": ("headers", "eventheaders", "messageheaders"),
    "idempotency_key": ("idempotencykey", "deduplicationid", "deduplicationkey", "dedupkey", "dedupid"),
    "correlation_id": ("correlationid",),
    "causation_id": ("causationid",),
    "traceparent": ("traceparent",),
    "trace_id": ("traceid",),
    "version": ("eventversion", "schemaversion"),
}
# Names that are often something different: lines to uncomment.
_MAYBE: Final[dict[str, tuple[str, ...]]] = {
    "version": ("version",),
    "headers": ("metadata", "meta"),
    "next_attempt_at": ("scheduledat", "availableat"),
}
_PENDING: Final = (
    *("pending", "new", "unpublished", "unprocessed", "unsent", "created", "ready", "waiting", "queued"),
    *("initial", "init", "stored", "open", "todo", "scheduled", "notpublished", "notsent", "enqueued"),
)
_PROCESSED: Final = (
    *("processed", "published", "sent", "done", "completed", "complete", "dispatched", "delivered"),
    *("success", "succeeded", "finished", "relayed", "handled", "ok"),
)
_FAILED: Final = ("failed", "failure", "error", "dead", "deadletter", "deadlettered", "broken", "rejected")
MEANINGS: Final = {"pending": _PENDING, "processed": _PROCESSED, "failed": _FAILED}


@dataclass(frozen=True, slots=True)
class Guess:
    """A column for an entry of [table.columns]."""

    name: str
    reason: str
    others: list[str] = field(default_factory=list)
    """Columns that could be meant instead."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """What could be guessed; the relay needs more than that if something is missing."""

    columns: dict[str, Guess]
    maybe: dict[str, str]
    """Columns whose names often mean something different, by entry."""
    unused: list[Column]


def status_of(columns: Sequence[Column]) -> Column | None:
    """Return the column that seems to be the status."""
    return next(iter(_named(columns, "status")), None)


def has_time(columns: Sequence[Column]) -> bool:
    """Return whether a column seems to be the time at which its row was published."""
    return bool(_named(columns, "published_at"))


def flags(columns: Iterable[Column]) -> list[Column]:
    """Return the booleans that seem to say which rows are published."""
    return [
        each for each in columns if each.type == "bool" and normal(each.name).removeprefix("is") in _PROCESSED
    ]


def guess(columns: Sequence[Column], *, uses_status: bool) -> Guesses:
    """Return which column is what.

    Args:
        uses_status: whether a status says what is pending; then the time of publishing is `processed_at`.
    """
    guesses: dict[str, Guess] = {}
    left_out = {"seq", "published_at"} if uses_status else {"seq", "processed_at", "status"}
    if seq := _seq(columns):
        guesses["seq"] = seq
    for ours in _SYNONYMS:
        if ours not in COLUMNS or ours in left_out:
            continue
        taken = {guess.name for guess in guesses.values()}
        named = _named(columns, ours)
        free = [column for column in named if column.name not in taken]
        if ours == "id" and not free:
            free = named or [column for column in columns if column.is_unique and column.can_be("id")][:1]
        if ours == "created_at" and not free:
            free = [column for column in columns if column.name not in taken and _is_time_of_insert(column)]
        if free:
            guesses[ours] = Guess(free[0].name, free[0].declared, [column.name for column in free[1:]])
    taken = {guess.name for guess in guesses.values()}
    maybe = {
        ours: column.name
        for ours, names in _MAYBE.items()
        for column in columns
        if ours not in guesses and column.name not in taken and normal(column.name) in names
        if column.can_be(ours)
    }
    used = taken | set(maybe.values())
    return Guesses(guesses, maybe, [column for column in columns if column.name not in used])


def guess_values(values: Iterable[str], default: str | None) -> dict[str, str]:
    """Return which value of a status is what: `pending`, `processed`, `failed`.

    Args:
        default: the value of a new row, or None.
    """
    known = list(values)
    by_name = {normal(value): value for value in known}
    found: dict[str, str] = {}
    for meaning, names in MEANINGS.items():
        if match := next((by_name[name] for name in names if name in by_name), None):
            found[meaning] = match
    if default is not None and default not in (found.get("processed"), found.get("failed")):
        # A new row is pending, whatever the word for it is.
        found["pending"] = default
    return found


def literal_default(default: str | None) -> str | None:
    """Return the value of a default that is a literal text, label or integer."""
    if re.fullmatch(r"-?\d+", default or ""):
        return default
    match = re.match(r"'((?:[^']|'')*)'(?:::|$)", default or "")
    return match[1].replace("''", "'") if match else None


def literals(condition: str) -> list[str]:
    """Return the texts in a condition, such as the values that a CHECK allows."""
    return [text.replace("''", "'") for text in re.findall(r"'((?:[^']|'')*)'", condition)]


def _seq(columns: Sequence[Column]) -> Guess | None:
    whole = [column for column in columns if column.can_be("seq") and column.never_null]
    names = _SYNONYMS["seq"]
    named = [
        column for column in whole if normal(column.name) in names and (column.is_counted or column.is_unique)
    ]
    counted = [column for column in whole if column.is_counted and column not in named]
    if not (candidates := named + counted):
        return None
    how = "counted by the database" if candidates[0].is_counted else "unique"
    return Guess(
        candidates[0].name, f"{candidates[0].declared}, {how}", [column.name for column in candidates[1:]]
    )


def _named(columns: Sequence[Column], ours: str) -> list[Column]:
    names = _SYNONYMS[ours]
    fitting = [each for each in columns if normal(each.name) in names and _can_be(each, ours)]
    return sorted(fitting, key=lambda each: names.index(normal(each.name)))


def _can_be(column: Column, ours: str) -> bool:
    # A number or a UUID can name a type, but it rather names an aggregate. Statements cannot contain a %.
    is_type = ours in ("aggregate_type", "event_type")
    if "%" in column.name or (is_type and not column.is_text) or (ours in NULLED and column.never_null):
        return False
    return column.can_be(ours)


def _is_time_of_insert(each: Column) -> bool:
    is_now = bool(re.search(r"now\(\)|CURRENT_TIMESTAMP|LOCALTIMESTAMP|clock_timestamp", each.default or ""))
    return each.can_be("created_at") and is_now


def normal(name: str) -> str:
    """Return a name without underscores and in lower case, in which spellings of one name agree."""
    return re.sub(r"[\W_]", "", name.lower())


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
        "Sequin",
        frozenset({"sourcedatabaseid", "sourcetableoid", "recordpk", "record", "action", "committedat"}),
        refusal="with changes of other tables, which it retains: describe the table that your application "
        "writes",
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
