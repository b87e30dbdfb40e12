"""The commands `outbox archive …` that read: query, report, and the history of an aggregate.

Invariants:
- A file that a command writes is never one of the archive, nor a device or a link.
- CSV and JSON print values in full; a table of the terminal shortens them and has no control characters.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from outbox_pipelines.cli.options import DAY
from outbox_pipelines.config import parsed
from outbox_pipelines.core import log
from outbox_pipelines.core.files import replacing, require_replaceable
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted, plain, plain_lines
from outbox_pipelines.days.archive import rendering
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    import duckdb

    from outbox_pipelines.days.archive import Archive

Row = tuple[Any, ...]
# Maximum width of a cell in the printed table; CSV and JSON print values in full.
_WIDTH: Final = 80
_SPECIAL: Final = re.compile(r'[",\r\n]')
# The columns of EXPLAIN's result, a drawing that is printed as is.
_PLAN: Final = ["explain_key", "explain_value"]
_NUMBERS: Final = ("tinyint", "smallint", "integer", "bigint", "hugeint", "float", "double", "decimal")


@click.command()
@click.argument("sql")
@click.option("--csv", "form", flag_value="csv", help="Print CSV, all rows.")
@click.option("--json", "form", flag_value="json", help="Print one JSON array, all rows.")
@click.option(
    "--parquet",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all rows to this Parquet file.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Maximum rows (default for a table: 100).",
)
@click.option(
    "--read",
    "beside",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another file that the query may read; repeatable.",
)
@click.pass_obj
def query(
    settings: Settings,
    sql: str,
    form: str | None,
    parquet: Path | None,
    limit: int | None,
    beside: tuple[Path, ...],
) -> None:
    """Query the archive in SQL: one SELECT or PIVOT over the view `events`, or EXPLAIN, in DuckDB's dialect.

    The view `latest` has the last event of each aggregate. With OUTBOX_CATALOG_FILE, there is a view for each
    documented event type, such as "order.placed", with the members of the payload as columns. With
    OUTBOX_KEYS_DSN and a master key, these are decrypted, and there is a function decrypted(payload): what
    was erased is null.

    SQL is the text, the name of a file that ends in .sql, or - for standard input. The columns are
    `event_date` (the UTC day) and those of `outbox archive query "DESCRIBE events"`. Filter by day
    (WHERE event_date >= '2026-11-01'): files of other days are not opened. No database is needed. The query
    can read only the archive's files and those of --read.
    """
    import duckdb

    from outbox_pipelines.days.archive.data_set import doubts

    if form and parquet:
        raise click.UsageError("choose one of --csv, --json, --parquet")
    archive = _open(settings, beside)
    if parquet is not None:
        _refuse_archived(settings, parquet)
        require_replaceable(parquet)
    try:
        asked = archive.query(_text(sql))
        if parquet is not None:
            rendering.write_parquet(asked if limit is None else asked.limit(limit), parquet)
            log.say(f"written to {parquet}", file=str(parquet))
        elif form is not None:
            _FORMS[form](*_rows(archive, asked if limit is None else asked.limit(limit)))
        else:
            _table(archive, asked, limit or 100)
    except duckdb.Error as error:
        from outbox_pipelines.days.archive.question import refusal

        raise refusal(error) from None
    # After the result: a query that needs such a file may have failed, and that error is one line.
    for doubt in doubts(archive):
        click.echo(plain(f"outbox: {doubt}"), err=True)


@click.command("report")
@click.option("--since", type=DAY, help="The first day (default: the first archived one).")
@click.option("--until", type=DAY, help="The last day (default: the last archived one).")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="The HTML file.",
)
@click.pass_obj
def write_report(settings: Settings, since: date | None, until: date | None, output: Path) -> None:
    """Write a page of the archive: one HTML file, which loads nothing.

    It has events, sizes, lag and dead letters by day and event type, the largest payloads, and the number of
    aggregates; of many days by week, month or year. The database is only asked whether the archive belongs
    to the outbox; unset OUTBOX_DSN if it does not answer.
    """
    from outbox_pipelines.days.archive import identity, report, report_page
    from outbox_pipelines.days.archive.store import named

    url = named(settings)
    _refuse_archived(settings, output)
    require_replaceable(output)
    if settings.dsn and parsed.mapping(settings) is None:
        identity.require_own(settings)
    opened = report.opened(url)
    # Opened first: an archive can take long to read.
    with replacing(output) as begun, begun.open("w", encoding="utf-8") as file:
        found = report.read(opened, since, until)
        file.write(report_page.page(found, report.largest(opened, found), report.aggregates(opened, found)))
    click.echo(
        f"{counted(found.total.events, 'event')} of {counted(found.archived, 'archived day')}, "
        f"{found.since} to {found.until}, in {plain(str(output))}"
    )


@click.command()
@click.argument("aggregate_type", metavar="TYPE")
@click.argument("aggregate_id", metavar="ID")
@click.option("--verify", is_flag=True, help="Compare manifests and files with their digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, with all columns.")
@click.pass_obj
def history(settings: Settings, aggregate_type: str, aggregate_id: str, verify: bool, as_json: bool) -> None:
    """Show the history of one aggregate, in the order of seq, from the table and the archive.

    Reads attached days from the table and dropped days from OUTBOX_ARCHIVE. A dead letter of a dropped day
    has the status of now. Exits with 1 if the aggregate has no events.

    Without --verify, a file that was changed and kept its size is read as it is.
    """
    from outbox_pipelines.days.archive import history as histories

    found = histories.history(settings, aggregate_type, aggregate_id, verify=verify)
    if as_json:
        _json(histories.COLUMNS, map(dataclasses.astuple, found))
    else:
        _print(
            ["seq", "created_at (UTC)", "event_type", "status", "in", "payload"],
            [
                (
                    one.seq,
                    f"{one.created_at:%Y-%m-%d %H:%M:%S}",
                    one.event_type,
                    one.status,
                    one.place,
                    one.payload,
                )
                for one in found
            ],
            ["right", *["left"] * 5],
        )
    for status in sorted(histories.NOTES.keys() & {one.status for one in found}):
        click.echo(f"outbox: {status}: {histories.NOTES[status]}", err=True)
    if not found:
        click.echo(f"outbox: no events found for {plain(f'{aggregate_type} {aggregate_id}')}", err=True)
        sys.exit(1)


def _open(settings: Settings, beside: Sequence[Path]) -> Archive:
    from outbox_pipelines.days.archive import open_archive
    from outbox_pipelines.days.archive.store import named

    catalog = None
    if settings.catalog_file is not None:
        try:
            from outbox_pipelines.catalog.document import require_catalog

            catalog = require_catalog(settings)
        except (SetupError, ImportError) as error:
            log.say(f"no views of event types: {error}")
    keys = None
    if settings.keys_dsn:
        from outbox_pipelines.subject_keys.subject_keys import subject_keys_of

        try:
            keys = subject_keys_of(settings)
        except SetupError as error:
            log.say(f"no function decrypted: {error}")
    return open_archive(named(settings), beside=beside, catalog=catalog, keys=keys)


def _text(sql: str) -> str:
    if sql == "-":
        return sys.stdin.read()
    if not sql.endswith(".sql"):
        return sql
    try:
        return Path(sql).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read the query file: {first_line(error)}") from None


def _rows(archive: Archive, asked: duckdb.DuckDBPyRelation) -> tuple[list[str], Iterator[Row]]:
    """Return the columns and an iterator over the rows, which are fetched in chunks."""
    found = rendering.rendered(asked)
    return found.columns, _fetch(archive.connection.execute(found.sql_query()))


def _fetch(cursor: duckdb.DuckDBPyConnection) -> Iterator[Row]:
    while rows := cursor.fetchmany(rendering.ROWS_AT_ONCE):
        yield from rows


def _refuse_archived(settings: Settings, file: Path) -> None:
    archive = Path(settings.archive.removeprefix("file://")).expanduser().absolute()
    # `resolve` refuses a link to itself in other words.
    if Path(os.path.realpath(file)).is_relative_to(archive.resolve()):
        raise SetupError(f"{file} is in the archive, which is read-only: choose a file elsewhere")


def _table(archive: Archive, asked: duckdb.DuckDBPyRelation, limit: int) -> None:
    if asked.columns == _PLAN:
        for _, plan in asked.fetchall():
            click.echo(plain_lines(str(plan).rstrip()))
        return
    columns, rows = _rows(archive, asked.limit(limit + 1))
    found = list(rows)
    _print(columns, found[:limit], ["right" if kind.id in _NUMBERS else "left" for kind in asked.types])
    if len(found) > limit:
        click.echo(f"outbox: showing the first {limit} rows: use --limit for more, --csv for all", err=True)


def _print(columns: Sequence[str], rows: Sequence[Row], align: Sequence[str]) -> None:
    from tabulate import tabulate

    cells = [[_cell(value) for value in row] for row in rows]
    click.echo(tabulate(cells, list(map(plain, columns)), disable_numparse=True, colalign=align))


def _csv(columns: Sequence[str], rows: Iterator[Row]) -> None:
    # A file or another program gets every character; a terminal would execute some.
    shown = plain if sys.stdout.isatty() else str
    sys.stdout.writelines(shown(",".join(map(_field, row))) + "\n" for row in chain([columns], rows))


def _field(value: object) -> str:
    """Return a value of CSV; as in PostgreSQL's COPY, '' has quotes and NULL has none."""
    if value is None:
        return ""
    text = rendering.text_of(value)
    return text if text and not _SPECIAL.search(text) else '"' + text.replace('"', '""') + '"'


def _json(columns: Sequence[str], rows: Iterator[Row]) -> None:
    click.echo("[", nl=False)
    for number, row in enumerate(rows):
        click.echo(",\n " if number else "\n ", nl=False)
        click.echo(rendering.json_of(dict(zip(columns, row, strict=True))), nl=False)
    click.echo("\n]")


_FORMS: Final[dict[str, Callable[[Sequence[str], Iterator[Row]], None]]] = {"csv": _csv, "json": _json}


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = plain(" ".join(rendering.text_of(value).split("\n")))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
