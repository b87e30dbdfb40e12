"""Reads the content of single rows, and finds those that cannot be read.

Invariants:
- One row at a time is in memory, and no row of more than `MOST`.
- A row at which the database fails is found by bisection; the rows beside it are read as usual. An error that
  is not about a row (a lost session, a missing right) is raised.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any, Final, LiteralString

import psycopg

from outbox_pipelines.database import Connection
from outbox_pipelines.relay import queries
from outbox_pipelines.secret import first_line

FEW: Final = 8_000
"""Bytes of the largest row that is fetched together with hundreds of others."""
NOTHING: Final = -1
"""No content at all: rows are listed."""
MOST: Final = 8_000_000
"""Bytes of the largest row that is read at all. One wide character makes Python take four times as many."""

_TOO_LARGE: Final = (
    f"its text has more than {MOST:,} bytes, or its headers more than {queries.MOST_METADATA:,}, "
    "the most that the relay reads"
)
# The fields of `Event`.
_SEQ: Final = 0
_PAYLOAD: Final = 5

# Data exceptions, limits such as 1 GB for one text, and what only damaged or oversized values cause.
_CLASSES: Final = ("22", "54")
_STATES: Final = frozenset({"XX000", "XX001", "XX002"})


def is_about_a_row(error: psycopg.Error) -> bool:
    """Return whether a statement failed because of a row's content."""
    state = error.sqlstate or ""
    return state.startswith(_CLASSES) or state in _STATES


def read(
    connection: Connection,
    query: LiteralString | bytes,
    parameters: Mapping[str, Any],
    seqs: Sequence[int],
) -> Generator[tuple[int, tuple[Any, ...] | str]]:
    """Yield each seq with its row, or with the reason why it cannot be read; nothing for a row that is gone.

    Args:
        connection: nothing else may use it until the iterator is exhausted or closed.
        query: takes `seqs` and `most`, returns the columns of `Event` first, in order of seq.
        seqs: in ascending order.
    """
    parts = [list(seqs)]
    while parts:
        part = parts.pop()
        if not part:
            continue
        try:
            for row in _stream(connection, query, {**parameters, "seqs": part, "most": MOST}):
                part = [seq for seq in part if seq > row[_SEQ]] if part[0] != row[_SEQ] else part[1:]
                yield row[_SEQ], _TOO_LARGE if row[_PAYLOAD] is None else row
        except psycopg.Error as error:
            if not is_about_a_row(error):
                raise
            if len(part) == 1:
                yield part[0], f"the database cannot read it: {first_line(error)}"
            elif len(part) > 1:
                # Rows come in order, so it is mostly the first of those that are left.
                half = len(part) // 2 + 1
                parts += [part[half:], part[1:half], part[:1]]


def _stream(
    connection: Connection, query: LiteralString | bytes, parameters: Mapping[str, Any]
) -> Iterator[tuple[Any, ...]]:
    in_transaction = connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
    # A savepoint: what the transaction has locked stays locked.
    with connection.transaction() if in_transaction else nullcontext(), connection.cursor() as cursor:
        rows = cursor.stream(query, parameters, binary=True, size=1)
        assert isinstance(rows, Generator)
        with closing(rows):
            yield from rows
