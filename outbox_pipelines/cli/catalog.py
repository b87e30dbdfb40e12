"""The commands `outbox catalog …`: compare the event catalog, render it, and generate classes of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.core.text import counted, plain, plain_lines
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.catalog.comparison import Compared


_REGISTRY_SECONDS: Final = 10.0


@click.group()
def catalog() -> None:
    """Compare the event catalog (OUTBOX_CATALOG_FILE), render it as a page, and generate classes of it."""


@catalog.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def check(settings: Settings, as_json: bool) -> None:
    """Show every event type that is documented or found in the table's attached days.

    Exits with 1 if an event type is written that is undocumented or retired, or in a version that is not
    listed, if the settings name another topic than the catalog, or if a type has no schema for its format. An
    active type that does not occur in the table is shown but does not fail the check.
    """
    from outbox_pipelines.catalog.comparison import compare
    from outbox_pipelines.catalog.document import require_catalog
    from outbox_pipelines.catalog.subjects import Subjects

    compared = compare(settings)
    missing = Subjects(require_catalog(settings), settings).missing
    if as_json:
        click.echo(json.dumps([_object(each) for each in compared], indent=2, default=datetime.isoformat))
    else:
        click.echo(_table(compared))
    wrong = [each for each in compared if each.is_wrong]
    for each in wrong:
        click.echo(plain(f"outbox: {each.event_type} {_REMEDIES[each.status]}"), err=True)
    for event_type, why in missing.items():
        click.echo(plain(f"outbox: {event_type} {why}"), err=True)
    if wrong or missing:
        sys.exit(1)


@catalog.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File (default: stdout).")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["markdown", "html", "asyncapi"]),
    default="markdown",
    show_default=True,
    help="A page, or an AsyncAPI 3.0 document (JSON) of what the relay sends with these settings.",
)
@click.option(
    "--topics-url",
    type=TEXT,
    metavar="URL",
    help="Link each topic of the page: https://dagster.example.com/assets/topic, of a named outbox "
    "…/assets/outbox/NAME/topic.",
)
@click.option(
    "--api-version", type=TEXT, default="1.0.0", show_default=True, help="Version in the AsyncAPI document."
)
@click.pass_obj
def render(
    settings: Settings, output: Path | None, kind: str, topics_url: str | None, api_version: str
) -> None:
    """Render the event catalog: a table of all types, then each type with its fields. Needs no database."""
    from outbox_pipelines.catalog import asyncapi, page
    from outbox_pipelines.catalog.document import require_catalog

    found = require_catalog(settings)
    if kind == "asyncapi":
        document = asyncapi.document(found, settings, version=api_version)
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    else:
        if topics_url is not None and not re.fullmatch(r"https?://[^\s()<>\"'\\]+", topics_url):
            raise SetupError(
                f"--topics-url is {topics_url!r}: give an address such as https://HOST/assets/topic"
            )
        made = page.page if kind == "html" else page.markdown
        text = made(found, topics_url=topics_url)
    _write(output, text, counted(len(found.events), "event type"))


def _write(output: Path | None, text: str, what: str) -> None:
    if output is None:
        click.echo(plain_lines(text) if sys.stdout.isatty() else text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{output} cannot be written ({error.strerror}): choose another file") from None
    click.echo(f"{output}: {what}")


@catalog.command()
@click.option(
    "--output",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Directory of the files, such as order.placed@2.json.",
)
@click.option(
    "--check", "is_check", is_flag=True, help="Exit with 1 if a file is missing, or has another schema."
)
@click.pass_obj
def schemas(settings: Settings, directory: Path, is_check: bool) -> None:
    """Write the JSON Schema of each event type and version to a file, for other tools. Needs no database.

    Files of other versions stay. In CI, --check finds a schema that changes without a new `version`.
    """
    from outbox_pipelines.catalog import registration
    from outbox_pipelines.catalog.document import require_catalog

    files = registration.files(require_catalog(settings))
    if not is_check:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{directory} cannot be written ({error}): choose another directory") from None
        click.echo(f"{directory}: {counted(len(files), 'schema')}")
    elif different := registration.different(directory, files):
        for name in different:
            why = (
                "has another schema: give the type a new version"
                if (directory / name).exists()
                else "missing"
            )
            click.echo(plain(f"outbox: {directory / name}: {why}, and run without --check"), err=True)
        sys.exit(1)
    else:
        click.echo(f"{directory} is up to date")


@catalog.command("classes")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File (default: stdout).")
@click.option(
    "--check", "is_check", is_flag=True, help="Exit with 1 if the file of --output is not up to date."
)
@click.pass_obj
def classes_(settings: Settings, output: Path | None, is_check: bool) -> None:
    """Generate a Python class for each event type, for writers and consumers. Needs no database.

    The module needs pydantic 2: emit(connection, OrderPlaced(…)), @consumer.on(OrderPlaced). Retired types
    have no class. --check needs no generator; use it in CI.
    """
    from outbox_pipelines.catalog.classes import classes, is_current
    from outbox_pipelines.catalog.document import require_catalog

    found = require_catalog(settings)
    if not is_check:
        text = classes(found)
        _write(output, text, "classes of the event catalog")
        return
    if output is None:
        raise SetupError("--check needs the file to compare: add --output FILE")
    try:
        text = output.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{output} cannot be read ({error}): generate it without --check") from None
    if not is_current(found, text):
        click.echo(
            plain(
                f"outbox: {output} is not what the event catalog says, or was edited: run "
                f"outbox catalog classes --output {output}"
            ),
            err=True,
        )
        sys.exit(1)
    click.echo(f"{output} is up to date")


@catalog.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def diff(old: Path, new: Path, as_json: bool) -> None:
    """Show what the event catalog NEW changes, and whom it breaks. Needs no database.

    Writers are broken by a schema that is narrower: what they write, and what is archived, may not fit it.
    Consumers are broken by one that is wider, and by a type or topic that is removed. Exits with 1 if a
    change breaks either.

    In CI: git show main:catalog.yaml > old.yaml && outbox catalog diff old.yaml catalog.yaml
    """
    from outbox_pipelines.catalog.changes import changes
    from outbox_pipelines.catalog.document import read_catalog

    read = []
    for path in (old, new):
        try:
            read.append(read_catalog(path))
        except ValueError as error:
            raise SetupError(f"{path}: {error}") from None
    differences = changes(*read)
    if as_json:
        objects = [
            {
                "event_type": difference.event_type,
                "change": difference.what,
                "breaks": sorted(difference.breaks),
                "whom": difference.whom,
            }
            for difference in differences
        ]
        click.echo(json.dumps(objects, indent=2, ensure_ascii=False))
    else:
        rows = [("event type", "change", "breaks")]
        rows += [
            (
                difference.event_type,
                difference.what,
                f"{' and '.join(sorted(difference.breaks))}{_named(difference.whom)}",
            )
            for difference in differences
        ]
        click.echo(_columns(rows) if differences else "no difference")
    if any(difference.breaks for difference in differences):
        sys.exit(1)


@catalog.command()
@click.option("--check", "only_check", is_flag=True, help="Change nothing; show what it would do.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def register(settings: Settings, only_check: bool, as_json: bool) -> None:
    """Register the schemas of all types with the format json_schema, avro or protobuf in the schema registry.

    What is registered already stays. If a schema is missing, or not compatible with earlier versions of its
    subject, nothing is registered, and the command exits with 1. Needs no database.

    In CI, before a deployment: outbox catalog register --check
    """
    from outbox_pipelines.catalog import registration
    from outbox_pipelines.catalog.document import require_catalog
    from outbox_pipelines.catalog.subjects import Subjects
    from outbox_pipelines.registry import Registry

    subjects = Subjects(require_catalog(settings), settings)
    if not (subjects.of_event_types or subjects.missing):
        raise SetupError(
            "no type of the event catalog has a schema to register: set OUTBOX_FORMAT to json_schema, avro "
            "or protobuf, or format in the rules of types"
        )
    registry = Registry(settings, seconds=_REGISTRY_SECONDS)
    if only_check:
        results = registration.check(registry, subjects)
    else:
        results = registration.register(registry, subjects, settings.registry_compatibility)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False))
    else:
        rows = [("event type", "subject", "id", "")]
        rows += [
            (result.event_type, result.subject or "-", str(result.schema_id or "-"), result.status)
            for result in results
        ]
        click.echo(_columns(rows))
    for result in results:
        if result.why:
            click.echo(plain(f"outbox: {result.event_type} {result.why}"), err=True)
    if any(result.is_wrong for result in results):
        sys.exit(1)


def _named(whom: tuple[str, ...]) -> str:
    return f" ({', '.join(whom)})" if whom else ""


_REMEDIES = {
    "undocumented": "is written but not documented: add it to the event catalog",
    "misrouted": "is documented for another topic than the settings name: correct `topic` in the catalog, or "
    "the relay's settings",
    "unlisted": "is written in a version that the event catalog does not list: add it to `versions`, or "
    "correct the writer",
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
    return _columns(rows, right=1)


def _columns(rows: Sequence[tuple[str, ...]], *, right: int | None = None) -> str:
    """Return the rows in columns, one of which is aligned to the right."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n == right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"
