"""The commands `outbox adopt …`: from a marked table to the append-only outbox, while writers write."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from outbox_pipelines.cli.options import TEXT, seconds_option
from outbox_pipelines.core import log
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.existing.adopt.planning import Plan


_SECONDS: Final = seconds_option("Stop waiting after this time; the command can be repeated.")
_NEXT: Final = {
    "draining": "new events wait for the rows of before the switch: run `outbox adopt drain`",
    "adopted": "the relay of the append-only outbox may run",
}


@click.group()
def adopt() -> None:
    """Move the table of OUTBOX_TABLE to the append-only outbox, while writers write.

    The steps are plan, prepare, switch, drain and finish; back undoes switch. Each can be repeated. See
    docs/adopt.md.
    """


@adopt.command("plan")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show_plan(settings: Settings, as_json: bool) -> None:
    """Print what the steps would do, each statement with its locks; change nothing.

    Exits with 1 if something must be corrected first.
    """
    from outbox_pipelines.existing.adopt import planning

    found = planning.plan(settings)
    click.echo(json.dumps(dataclasses.asdict(found), indent=2) if as_json else _render(found))
    if found.judged.problems:
        sys.exit(1)


@adopt.command("prepare")
@click.pass_obj
def prepare_tables(settings: Settings) -> None:
    """Create the append-only outbox in OUTBOX_SCHEMA, beside the table, which does not change."""
    from outbox_pipelines.existing.adopt import steps

    _echo(steps.prepare(settings) or ["already prepared"])


@adopt.command("switch")
@click.option(
    "--accept",
    type=TEXT,
    multiple=True,
    metavar="NAME",
    help="Accept a consequence that plan names; repeatable.",
)
@_SECONDS
@click.pass_obj
def switch_names(settings: Settings, accept: tuple[str, ...], seconds: float) -> None:
    """Give the table's name to a view over the append-only outbox. The table keeps its rows.

    Stop the relays first. Writers wait for the lock for at most 50 ms at a time.
    """
    from outbox_pipelines.existing.adopt import steps

    switched = steps.switch(settings, list(accept), seconds=seconds, say=log.say)
    word = f"switched (attempt {switched.attempts})" if switched.changed else "already switched"
    _echo([f"{word}; {_NEXT[switched.state]}"])


@adopt.command("drain")
@click.option(
    "--rest",
    type=click.Choice(["wait", "publish", "skip"]),
    default="wait",
    show_default=True,
    help="For a table with a slot: what happens to events that the slot's reader, such as Debezium, has not "
    "published. wait: it publishes them; publish: this command does, in its place; skip: they count as "
    "published.",
)
@_SECONDS
@click.pass_obj
def drain_table(settings: Settings, rest: str, seconds: float) -> None:
    """Publish the rows that were written before the switch; then relays of the append-only outbox continue.

    If the description has a slot, wait until what reads it has published them. Exits with 1 if rows are left
    after --wait-seconds.
    """
    from outbox_pipelines.existing.adopt import steps
    from outbox_pipelines.existing.adopt.drain import Rest

    published = steps.drain(settings, seconds=seconds, say=log.say, rest=Rest(rest))
    _echo([f"{counted(published, 'row')} published; {_NEXT['adopted']}"])


@adopt.command("back")
@_SECONDS
@click.pass_obj
def go_back(settings: Settings, seconds: float) -> None:
    """Undo switch: the table gets its name again; its relay continues after the outbox's events.

    Exits with 1 if events are left after --wait-seconds; then run it again.
    """
    from outbox_pipelines.existing.adopt import steps

    done = steps.back(settings, seconds=seconds, say=log.say)
    _echo(["the table has its name again; its relay may run" if done.changed else "nothing left to undo"])


@adopt.command("finish")
@click.option("--drop", is_flag=True, help="Drop the table after the proof; this cannot be undone.")
@_SECONDS
@click.pass_obj
def finish_table(settings: Settings, drop: bool, seconds: float) -> None:
    """Archive the old table to OUTBOX_ARCHIVE as Parquet and prove it; with --drop, then drop the table."""
    from outbox_pipelines.existing.adopt import steps

    _echo(steps.finish(settings, drop=drop, seconds=seconds, say=log.say))


def _echo(lines: list[str]) -> None:
    click.echo("\n".join(map(plain, lines)))


def _render(plan: Plan) -> str:
    # 0 before the table was analyzed for the first time.
    rows = f"about {counted(plan.rows, 'row')}, " if plan.rows else ""
    pending = "published by its slot" if plan.pending is None else f"{plan.pending:,} pending"
    lines = [f"{plan.table}: {plan.state}, {rows}{pending}"]
    lines += [f"  must be corrected: {problem}" for problem in plan.judged.problems]
    lines += [f"  --accept {name}: {text}" for name, text in plan.judged.consequences.items()]
    lines += [f"  note: {note}" for note in plan.judged.notes]
    for step in plan.steps:
        lines += ["", f"outbox adopt {step.name}: {step.what}", f"  locks: {step.locks}"]
        lines += [f"  {line}" for statement in step.statements for line in _statement(statement)]
    return "\n".join(map(plain, lines))


def _statement(statement: Any) -> list[str]:
    return [line for line in f"{statement};".splitlines() if line.strip()]
