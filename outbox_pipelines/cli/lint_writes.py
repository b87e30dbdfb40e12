"""The command `outbox lint-writes`: what a developer types, and what a pre-commit hook runs.

Exit codes: 0 no findings; 1 findings, including files that cannot be parsed; 2 usage error.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from outbox_pipelines.core.text import counted, plain, to_json
from outbox_pipelines.errors import SetupError
from outbox_pipelines.lint.dual_write import DualWrite, dual_writes
from outbox_pipelines.lint.event_types import Documented
from outbox_pipelines.lint.finding import (
    APART,
    DEFAULT,
    HIDDEN,
    NOT_WRITTEN,
    RULES,
    UNDOCUMENTED,
    UNREADABLE,
    Finding,
)
from outbox_pipelines.lint.linter import Options, check, python_files, read_sources, sources_of


class _Codes(click.ParamType[frozenset[str]]):
    name = "codes"

    def convert(
        self, value: str | frozenset[str], parameter: click.Parameter | None, context: click.Context | None
    ) -> frozenset[str]:
        if isinstance(value, frozenset):
            return value
        codes = frozenset(code.strip() for code in value.split(","))
        if unknown := sorted(codes - set(RULES)):
            self.fail(f"unknown rule {', '.join(unknown)}: known rules are {', '.join(RULES)}")
        return codes


@click.command("lint-writes", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option(
    "--select",
    type=_Codes(),
    default=",".join(sorted(DEFAULT)),
    help="Only these rules: OB001,OB006.",
    show_default=False,
)
@click.option("--ignore", type=_Codes(), default=frozenset(), help="Ignore these rules.", show_default=False)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out files and directories with this name or path: tests, '*/migrations/*'; repeatable.",
)
@click.option(
    "--strict-inserts",
    is_flag=True,
    help="Also find direct inserts and changes (OB007, OB008) where nothing imports the writer.",
)
@click.option(
    "--atomic-requests",
    is_flag=True,
    help="Django runs views in a transaction (ATOMIC_REQUESTS).",
)
@click.option(
    "--after-commit",
    is_flag=True,
    help="Also find messages sent apart from a commit (OB011): a crash between the two loses one.",
)
@click.option(
    "--catalog",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also find event types that this event catalog does not have, or has as retired (OB012), and list "
    "calls whose type is not in sight (OB014).",
)
@click.option(
    "--not-written",
    is_flag=True,
    help="With --catalog, also find active event types that no code names (OB013).",
)
@click.option(
    "--report", is_flag=True, help="List every function that writes rows and publishes, and exit with 0."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.option("--github", is_flag=True, help="Print annotations for GitHub workflows.")
def lint_writes(
    paths: tuple[Path, ...],
    select: frozenset[str],
    ignore: frozenset[str],
    exclude: tuple[str, ...],
    strict_inserts: bool,
    atomic_requests: bool,
    after_commit: bool,
    catalog: Path | None,
    not_written: bool,
    report: bool,
    as_json: bool,
    github: bool,
) -> None:
    """Find outbox writes in Python code that are not in one transaction with their rows.

    Name the whole application: some rules look across files. The code is not imported or run. To accept a
    finding, add a comment `# outbox: ignore[OB001]`. Exit codes: 0 no findings; 1 findings, including files
    that cannot be parsed; 2 usage error.
    """
    try:
        files = python_files(paths, exclude)
        also = {UNREADABLE.code, *([APART.code] if after_commit else [])}
        also |= {UNDOCUMENTED.code, HIDDEN.code} if catalog else set()
        also |= {NOT_WRITTEN.code} if not_written else set()
        selected = (select | also) - ignore
        if catalog is None and selected & _OF_CATALOG:
            raise SetupError(f"{min(selected & _OF_CATALOG)} needs the event catalog: add --catalog FILE")
        documented = None if catalog is None else _documented(catalog)
        options = Options(selected, strict_inserts, atomic_requests, documented)
        if report:
            _report(dual_writes(read_sources(sources_of(files), options)), as_json=as_json)
            return
        found = check(files, options)
    except SetupError as error:
        click.echo(plain(f"outbox: {error}"), err=True)
        sys.exit(2)
    if as_json:
        click.echo(to_json([asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            click.echo(_annotation(finding) if github else _lines(finding))
        hidden = sum(finding.code == HIDDEN.code for finding in found)
        more = f"; {counted(hidden, 'event type')} not in sight" if hidden else ""
        shown = len(found) - hidden
        said = counted(shown, "finding") if shown else "no findings"
        click.echo(f"{said} in {counted(len(files), 'file')}{more}", err=True)
    if any(finding.code != HIDDEN.code for finding in found):
        sys.exit(1)


_OF_CATALOG: Final = {UNDOCUMENTED.code, NOT_WRITTEN.code, HIDDEN.code}


def _documented(path: Path) -> Documented:
    try:
        from outbox_pipelines.catalog.document import read_catalog
    except ImportError as error:
        raise SetupError(f"cannot read {path} ({error}): pip install 'outbox-pipelines[catalog]'") from None
    try:
        events = read_catalog(path).events
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SetupError(f"{path}: {error}") from None
    return Documented(str(path), text, {name: each.lifecycle for name, each in events.items()})


def _report(found: list[DualWrite], *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json([asdict(place) for place in found], indent=2))
        return
    for place in found:
        click.echo(plain(f"{place.path}:{place.line}: {place.function}: {place.order}"))
        for what, lines in (("writes", place.writes), ("publishes", place.publishes)):
            click.echo(plain(f"    {what}: " + "; ".join(lines)))
    said = counted(len(found), "function") if found else "no functions"
    click.echo(f"write and publish: {said}", err=True)


def _lines(finding: Finding) -> str:
    place = f"{finding.path}:{finding.line}:{finding.column}"
    return f"{plain(f'{place}: {finding.code} {finding.name}: {finding.why}')}\n    {finding.remedy}"


def _annotation(finding: Finding) -> str:
    place = f"file={_property(finding.path)},line={finding.line},col={finding.column}"
    level = "notice" if finding.code == HIDDEN.code else "error"
    return (
        f"::{level} {place},title={finding.code} {finding.name}::{_data(f'{finding.why}; {finding.remedy}')}"
    )


def _data(text: str) -> str:
    """Return a text as GitHub reads it in a workflow command: a line break would begin another command."""
    return plain(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
