"""Reads the content of single rows, and finds those that cannot be read.

Invariants:
- One row at a time is in memory, and no row of more than `MOST`; one of more than `USUAL` only with the right
  to read it, which one thread has at a time.
- A row at which the database fails is found by bisection; the rows beside it are read as usual. An error that
  is not about a row (a lost session, a missing right) is raised.
- Every statement is read to its end. psycopg cancels one that is half read, each on a new connection, and
  waits for it. So a statement returns few rows more than are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any, Final, LiteralString

import psycopg

from outbox_pipelines.core import sequence
from outbox_pipelines.core.event import LARGE
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.relay import queries

FEW: Final = 8_000
"""Bytes of the largest row that is fetched together with hundreds of others."""
NOTHING: Final = -1
"""No content at all: rows are listed."""
MOST: Final = 8_000_000
"""Bytes of the largest row that is read at all. One wide character makes Python take four times as many."""
USUAL: Final = LARGE // 4
"""Bytes of the largest row that never takes more than `LARGE` of memory."""

_TOO_LARGE: Final = (
    f"its text has more than {MOST:,} bytes, or its headers more than {queries.MOST_METADATA:,}, "
    "the most that the relay reads"
)
# Text that one statement returns, about: what may be read in vain. Fewer, larger rows are one statement each.
_AT_ONCE: Final = 1_000_000
# The fields of `Event`.
_SEQ: Final = 0
_PAYLOAD: Final = 5
_METADATA: Final = 6

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
    may_take_large: Callable[[], bool] = lambda: True,
) -> Generator[tuple[int, tuple[Any, ...] | str]]:
    """Yield each seq with its row, or with the reason why it cannot be read; nothing for a row that is gone.

    Args:
        connection: nothing else may use it until the iterator is exhausted or closed.
        query: takes `seqs` and `most`, returns the columns of `Event` first, in order of seq.
        seqs: in ascending order.
        may_take_large: asked before a row of more than `USUAL` bytes is read; without it, the rows end here.

    Raises:
        SequenceError: two rows have the same seq.
    """
    parts = [(list(seqs), USUAL)]
    count = 1
    while parts:
        part, most = parts.pop()
        if not part:
            continue
        if len(part) > count:
            parts.append((part[count:], most))
            part = part[:count]
        large: int | None = None
        rows_read, size = 0, 0
        try:
            with closing(_stream(connection, query, {**parameters, "seqs": part, "most": most})) as rows:
                for row in rows:
                    seq, is_left_out = row[_SEQ], row[_PAYLOAD] is None
                    if not part or seq < part[0]:
                        raise sequence.twice(seq)
                    part = [other for other in part if other > seq] if part[0] != seq else part[1:]
                    rows_read += 1
                    size += len(row[_PAYLOAD] or "") + len(row[_METADATA] or "")
                    if is_left_out and most < MOST:
                        large = seq
                        break
                    yield seq, _TOO_LARGE if is_left_out else row
        except psycopg.Error as error:
            if not is_about_a_row(error):
                raise
            if len(part) == 1:
                yield part[0], f"the database cannot read it: {first_line(error)}"
            elif len(part) > 1:
                # Rows come in order, so it is mostly the first of those that are left.
                half = len(part) // 2 + 1
                parts += [(part[half:], most), (part[1:half], most), (part[:1], most)]
        if large is not None:
            if not may_take_large():
                return
            parts += [(part, USUAL), ([large], MOST)]
        if size:
            count = max(1, min(2 * count, rows_read * _AT_ONCE // size))


def drop(rows: Iterable[tuple[Any, ...]]) -> bool:
    """Read the rows of a statement to its end; return whether there were any."""
    return bool(deque(rows, maxlen=1))


def _stream(
    connection: Connection, query: LiteralString | bytes, parameters: Mapping[str, Any]
) -> Generator[tuple[Any, ...]]:
    in_transaction = connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
    # A savepoint: what the transaction has locked stays locked.
    with connection.transaction() if in_transaction else nullcontext(), connection.cursor() as cursor:
        rows = cursor.stream(query, parameters, binary=True, size=1)
        try:
            # `yield from` would end the statement together with this generator.
            for row in rows:  # noqa: UP028
                yield row
        finally:
            try:
                drop(rows)
            except psycopg.Error as error:
                # About a row that was not needed: its own read finds it.
                if not is_about_a_row(error):
                    raise
