"""What Dagster's pages show: text of events, and errors that an operator must act on, each in one line.

Invariants:
- A page loads what a text names, and an image can launch a job. So text of an event is not Markdown: a
  description is escaped (`text.markdown`), a report is a table.
- Such text is one line in tables, logs and failures (`text.plain`): they are shown on terminals, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError

_MOST_SECONDS: Final = 86_400


def report(lines: Iterable[str]) -> dg.TableMetadataValue:
    """Return lines as metadata."""
    return table([{"report": line} for line in lines], "report")


def table(rows: Sequence[Mapping[str, Any]], *columns: str) -> dg.TableMetadataValue:
    """Return rows as metadata.

    Args:
        columns: in their order; those of the first row if none are given.
    """
    names = columns or tuple(next(iter(rows), {"": ""}))
    return dg.MetadataValue.table(
        [
            dg.TableRecord({name: plain(it) if isinstance(it, str) else it for name, it in row.items()})
            for row in rows
        ],
        schema=dg.TableSchema([dg.TableColumn(name) for name in names]),
    )


def said(outbox: Outbox, error: BaseException) -> str | None:
    """Return an error of the packages or the database in one line; None for any other error."""
    import psycopg

    from outbox_pipelines.core.secret import first_line

    if isinstance(error, SetupError):
        return plain(outbox.by_its_variables(str(error)))
    if isinstance(error, psycopg.Error):
        return plain(f"the database refuses: {first_line(error)}")
    return None


@contextmanager
def one_line(outbox: Outbox) -> Iterator[None]:
    """Convert errors of the packages and the database into a `dg.Failure` with their message."""
    try:
        yield
    except Exception as error:
        if (text := said(outbox, error)) is None:
            raise
        raise dg.Failure(text) from None


def require_seconds(name: str, seconds: float) -> None:
    """Raise a `dg.Failure` if a run's configuration has no usable time: a wait for NaN never ends."""
    if not 0 <= seconds <= _MOST_SECONDS:
        raise dg.Failure(
            f"{name} is {seconds}: write a number of seconds from 0 to {_MOST_SECONDS:,}", allow_retries=False
        )


def day_of(
    context: dg.OpExecutionContext | dg.AssetExecutionContext | dg.AssetCheckExecutionContext,
) -> date:
    """Return the day of a run.

    Raises:
        Failure: the run has no day, or a partition that is none; tags of the launchpad allow both.
    """
    if not context.has_partition_key:
        raise dg.Failure(
            "the run has no day: choose a partition in the launchpad, or days on the job's page Partitions",
            allow_retries=False,
        )
    try:
        return date.fromisoformat(context.partition_key)
    except ValueError:
        raise dg.Failure(
            f"the partition {plain(context.partition_key)} is no day: choose one in the launchpad, or write "
            "YYYY-MM-DD",
            allow_retries=False,
        ) from None
