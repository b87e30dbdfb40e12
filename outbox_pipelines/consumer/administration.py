"""What an operator does in the database of consumers: their tables, backlogs and dead letters.

Invariants:
- `sql/consumer/` makes the tables, each file one statement that changes nothing where it has run before.
- What was recorded within `keep` stays, however old its event is; what goes, goes a day at a time.
- Nothing is lost: a discarded dead letter keeps its content until it is pruned.
- Each replay and each discard leaves a row in `inbox_audit`, in its own transaction: who, when, why, which.
- Ids alone do not select dead letters of several sources to be replayed or discarded.
- A consumer sees a replayed message within a second; the message has all its attempts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql

from outbox_pipelines import Error
from outbox_pipelines.config.message_names import REPLAY_ID
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.config import SchemaReader
from outbox_pipelines.consumer.event_values import framed, json_of
from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.core import scripts
from outbox_pipelines.errors import SetupError

# The ring has 64 days. A day is emptied this long after its last event was handled, and has to be before its
# place is used again.
MOST_DAYS: Final = 50
_AT_ONCE: Final = 10_000
Connection = psycopg.Connection[Any]
Action = Literal["replay", "discard"]
_ACT: Final[dict[Action, LiteralString]] = {
    "replay": queries.REPLAY,
    "discard": queries.DISCARD,
}


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did."""

    emptied: tuple[str, ...]
    """Partitions."""
    busy: tuple[str, ...]
    """Partitions that were in use; the next call empties them."""
    deleted: int
    """Rows of ids that contain no time."""
    deleted_messages: int
    """Handled or discarded messages of the inbox."""


def migrate(connection: Connection) -> None:
    """Create the tables in the first schema of the search_path; existing ones do not change.

    An open transaction includes the change; otherwise the change is committed.

    Raises:
        SetupError: the schema has a table of another shape with a name of the consumer's, or a later version
            made the tables and this one does not run with them.
    """
    try:
        with connection.transaction():
            for file in scripts.files("consumer"):
                connection.execute(file.read_bytes())
            require_tables(connection)
    except psycopg.errors.RaiseException as error:
        diag = error.diag
        raise SetupError(f"{diag.message_primary}: {diag.message_hint}") from None


def require_version(made: Mapping[str, str | None]) -> None:
    """Raise `SetupError` if this version does not run with tables that these files have made."""
    scripts.require("consumer", made, "the schema of the consumer's tables", "run `outbox consumer migrate`")


def require_tables(connection: Connection) -> None:
    """Raise `SetupError` if this version does not run with the tables."""
    require_version(dict(_rows(connection, queries.VERSIONS)))


def prune(connection: Connection, keep: timedelta) -> Pruned:
    """Delete the records of events handled longer than `keep` ago, 1 to 50 days; needs the tables' owner.

    A partition is emptied once everything in it is that old. Only a consumer that handles an event of such an
    old day waits, while its rows are read: up to 0.5 s per million.

    Raises:
        SetupError: `keep` is out of range, or the connection has an open transaction.
    """
    if not timedelta(days=1) <= keep <= timedelta(days=MOST_DAYS):
        raise SetupError(f"keep is {keep}: give 1 to {MOST_DAYS} days")
    if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise SetupError("the connection has an open transaction: commit it first")
    with connection.transaction():
        names = [name for (name,) in _rows(connection, queries.PARTITIONS)]
    emptied, busy = [], []
    for name in names:
        try:
            if _empty(connection, name, keep):
                emptied.append(name)
        except psycopg.errors.LockNotAvailable:
            busy.append(name)
    deleted, messages = (
        _delete(connection, query, keep) for query in (queries.DELETE_OTHERS, queries.DELETE_RECEIVED)
    )
    return Pruned(tuple(emptied), tuple(busy), deleted, messages)


def _empty(connection: Connection, name: str, keep: timedelta) -> bool:
    # regclass::text has quoted the name, and qualified it where it must be.
    partition = {"partition": sql.SQL(name)}
    is_over = sql.SQL(queries.IS_OVER).format(**partition)
    with connection.transaction():
        if not _value(connection, is_over, {"keep": keep}):
            return False
    with connection.transaction():
        connection.execute(queries.LOCK_TIMEOUT)
        connection.execute(sql.SQL(queries.LOCK).format(**partition))
        # A consumer can have handled an event of that day since.
        if not _value(connection, is_over, {"keep": keep}):
            return False
        connection.execute(sql.SQL(queries.EMPTY).format(**partition))
        return True


def _delete(connection: Connection, query: LiteralString, keep: timedelta) -> int:
    deleted = 0
    while True:
        with connection.transaction():
            now = connection.execute(query, {"keep": keep, "limit": _AT_ONCE}).rowcount
        deleted += now
        if now < _AT_ONCE:
            return deleted


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter, without its content."""

    seq: int
    id: str
    source: str
    event_type: str
    key: str
    topic: str
    partition: int
    offset: int
    attempts: int
    received_at: datetime
    error: str
    replay: str | None
    """The id of the replay that has published the event again, None for others."""


@dataclass(frozen=True, slots=True)
class FoundDeadLetters:
    """Dead letters, the newest first, and their number by reason."""

    total: int
    by_error: dict[str, int] = field(default_factory=dict)
    rows: list[DeadLetterRow] = field(default_factory=list)


class ConsumerDeadLetters:
    """The dead letters of consumers; selected by the options of `outbox consumer dead-letters`.

    Args:
        registry: reads values in Avro and Protobuf to be shown.
    """

    def __init__(self, connection: Connection, registry: SchemaReader | None = None) -> None:
        self._connection = connection
        self._registry = registry

    def find(self, given: Mapping[str, Any], *, limit: int = 50, discarded: bool = False) -> FoundDeadLetters:
        """Return the selected dead letters.

        Args:
            limit: rows at most; the counts are of all.
            discarded: return discarded ones instead.
        """
        which = _selected(given, "discarded" if discarded else "failed") | {"limit": limit}
        counts = _rows(self._connection, queries.COUNT_DEAD_LETTERS, which)
        rows = _rows(self._connection, queries.LIST_DEAD_LETTERS, which)
        by_error: dict[str, int] = {error or "": count for error, count in counts}
        found = [DeadLetterRow(*(*columns, _replay_of(headers))) for *columns, headers in rows]
        return FoundDeadLetters(sum(by_error.values()), by_error, found)

    def show(self, given: UUID) -> list[dict[str, Any]]:
        """Return a message with its content and audit, for each source; an empty list if there is none."""
        return [
            {
                **row,
                "replay": _replay_of(headers),
                "payload": self._content(payload, dict(headers)),
                "headers": dict(headers),
            }
            for row, payload, headers in _rows(self._connection, queries.SHOW, {"id": given})
        ]

    def _content(self, payload: bytes | None, headers: Mapping[str, str | None]) -> Any:
        if self._registry is not None and (found := framed(payload, headers)) is not None:
            # Without it the bytes are shown.
            with suppress(Error, ValueError):
                if (read := self._registry.reader(found[0])) is not None:
                    return read(found[1])
        return _text(payload)

    def act(self, action: Action, given: Mapping[str, Any], *, actor: str, reason: str) -> int:
        """Replay or discard the selected dead letters; return their number.

        Args:
            actor: who does it, for the audit.
            reason: why, for the audit.

        Raises:
            SetupError: ids are given without a source, and several sources have them.
        """
        which = _selected(given) | {"actor": actor, "reason": reason}
        with self._connection.transaction():
            self.check_action(action, given)
            return self._connection.execute(_ACT[action], which).rowcount

    def check_action(self, action: Action, given: Mapping[str, Any]) -> None:
        """Raise `SetupError` if ids are given without a source, and several sources have them."""
        which = _selected(given)
        if not which["ids"] or which["source"] is not None:
            return
        sources = [source for (source,) in _rows(self._connection, queries.SOURCES_OF_DEAD_LETTERS, which)]
        if len(sources) > 1:
            raise SetupError(
                f"dead letters of several sources have these ids ({', '.join(sources)}), and none was "
                "changed: add --source with the one that you mean"
            )


def backlogs(connection: Connection) -> list[Backlog]:
    """Return the backlog of every source that has waiting messages or dead letters."""
    return [Backlog.of(*row) for row in _rows(connection, queries.STATUS, {"source": None})]


def _selected(given: Mapping[str, Any], state: str = "failed") -> dict[str, Any]:
    """Return the parameters of the queries; a condition that is not given is None."""
    conditions = ("source", "event_type", "key", "error", "since", "until")
    ids = [*given.get("ids", ())] or None
    return {name: given.get(name) for name in conditions} | {"ids": ids, "state": state}


def _replay_of(headers: Iterable[tuple[str, str | None]]) -> str | None:
    return next((text for name, text in headers if name == REPLAY_ID), None)


def _text(payload: bytes | None) -> Any:
    """JSON as it is meant, text as it is, bytes in hexadecimal."""
    if payload is None:
        return None
    try:
        return json.loads(json_of(payload))
    except (ValueError, RecursionError):
        pass
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return payload.hex()


def _rows(connection: Connection, query: Any, given: Any = None) -> list[tuple[Any, ...]]:
    """Return rows as tuples, regardless of the connection's row factory."""
    with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        return cursor.execute(query, given).fetchall()


def _value(connection: Connection, query: Any, given: Any) -> Any:
    [(value,)] = _rows(connection, query, given)
    return value
