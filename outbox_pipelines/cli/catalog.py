"""The commands `outbox catalog …`: check that every event type is documented, and render the catalog."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outbox_pipelines.core.text import plain, plain_lines
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.catalog.comparison import Compared


@click.group()
def catalog() -> None:
    """Compare the event catalog with the table, and render it as a page (OUTBOX_CATALOG_FILE)."""


@catalog.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def check(settings: Settings, as_json: bool) -> None:
    """Show every event type that is documented or found in the table's attached days.

    Exits with 1 if an event type is written that is undocumented or retired. An active type that does not
    occur in the table is shown but does not fail the check.
    """
    from outbox_pipelines.catalog.comparison import compare

    compared = compare(settings)
    if as_json:
        click.echo(json.dumps([_object(each) for each in compared], indent=2, default=datetime.isoformat))
    else:
        click.echo(_table(compared))
    wrong = [each for each in compared if each.is_wrong]
    for each in wrong:
        click.echo(plain(f"outbox: {each.event_type} {_REMEDIES[each.status]}"), err=True)
    if wrong:
        sys.exit(1)


@catalog.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File (default: stdout).")
@click.option("--html", "as_html", is_flag=True, help="Render one HTML file instead of Markdown.")
@click.pass_obj
def render(settings: Settings, output: Path | None, as_html: bool) -> None:
    """Render the event catalog: a table of all types, then each type with its fields. Needs no database."""
    from outbox_pipelines.catalog import page
    from outbox_pipelines.catalog.document import require_catalog

    found = require_catalog(settings)
    text = page.page(found) if as_html else page.markdown(found)
    if output is None:
        click.echo(plain_lines(text) if sys.stdout.isatty() else text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{output} cannot be written ({error.strerror}): choose another file") from None
    click.echo(f"{output}: {len(found.events)} event types")


_REMEDIES = {
    "undocumented": "is written but not documented: add it to the event catalog",
    "retired": "is retired but still written: stop its writer, or set retired_on if these rows are older",
}


def _object(each: Compared) -> dict[str, Any]:
    seen = each.seen
    return {
        "event_type": each.event_type,
        "lifecycle": each.lifecycle,
        "status": each.status,
        "events": seen.events if seen else 0,
        "first_at": seen.first_at if seen else None,
        "last_at": seen.last_at if seen else None,
        "aggregate_types": seen.aggregate_types if seen else [],
    }


def _table(compared: list[Compared]) -> str:
    rows = [("event type", "events", "first (UTC)", "last (UTC)", "aggregates", "lifecycle", "")]
    for each in compared:
        seen = each.seen
        rows.append(
            (
                each.event_type,
                f"{seen.events:,}" if seen else "0",
                _minute(seen.first_at) if seen else "-",
                _minute(seen.last_at) if seen else "-",
                ", ".join(seen.aggregate_types) if seen else "-",
                each.lifecycle or "-",
                "" if each.status == "ok" else each.status.upper() if each.is_wrong else each.status,
            )
        )
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n == 1 else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"
