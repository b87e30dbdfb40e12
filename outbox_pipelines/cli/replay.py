"""The commands `outbox replay …`: send published events again."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from outbox_pipelines.cli.options import TEXT, settings_of
from outbox_pipelines.core import log
from outbox_pipelines.core.signals import until_signal
from outbox_pipelines.core.text import counted, plain, short
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.replay.replay_record import Replay
    from outbox_pipelines.replay.replays import Counted

_RATE: Final = 10_000
_OPTIONS: Final = {
    **{name: f"--{name.replace('_', '-')}" for name in ("since", "until", "where", "to_topic", "same_topic")},
    **{name: f"--{name.replace('_', '-')}" for name in ("reason", "dry_run")},
    **{name: f"--{name.replace('_', '-')[:-1]}" for name in ("topics", "aggregate_types", "event_types")},
    **{"aggregate_ids": "--aggregate-id", "ids": "--id", "creates": "--create"},
}


@click.group(invoke_without_command=True)
@click.option("--since", type=TEXT, help="From this UTC day or time on.")
@click.option("--until", type=TEXT, help="Up to this UTC day, which is included, or before this time.")
@click.option("--topic", "topics", type=TEXT, multiple=True, help="Published to this topic; repeatable.")
@click.option("--aggregate-type", "aggregate_types", type=TEXT, multiple=True, help="Repeatable.")
@click.option("--aggregate-id", "aggregate_ids", type=TEXT, multiple=True, help="Repeatable.")
@click.option("--event-type", "event_types", type=TEXT, multiple=True, help="Repeatable.")
@click.option("--id", "ids", type=TEXT, multiple=True, help="This event; repeatable.")
@click.option("--where", type=TEXT, help="A condition in DuckDB's SQL on the columns of the archive.")
@click.option("--to-topic", type=TEXT, help="Topic, or a template such as '{topic}.replay'.")
@click.option("--same-topic", is_flag=True, help="Send to the topics of the originals.")
@click.option("--create", "creates", is_flag=True, help="Create missing topics.")
@click.option("--reason", type=TEXT, help="Why, for the record.")
@click.option(
    "--rate",
    type=click.IntRange(1),
    default=_RATE,
    show_default=True,
    help="Events a second at most.",
)
@click.option("--dry-run", is_flag=True, help="Count the events by day and type; send nothing.")
@click.option("--resume", type=click.UUID, metavar="ID", help="Continue a replay that was stopped.")
@click.pass_context
def replay(context: click.Context, /, **given: Any) -> None:
    """Send published events again, in the order of seq, marked with the header replay-id.

    Attached days are read from the table, dropped days from the archive. Consumers skip replayed events,
    unless a handler asks for them. Ctrl-C stops; after a crash, events of the last second may be sent twice,
    with OUTBOX_DELIVERY=exactly_once none. Exits with 1 if nothing is selected, or if it was stopped or
    canceled.
    """
    if context.invoked_subcommand is not None:
        return
    settings = settings_of(context)
    if given["resume"] is not None:
        _resume(settings, given)
        return
    targets = given["same_topic"] + (given["to_topic"] is not None)
    if targets == 2 or not (targets or given["dry_run"]):
        raise SetupError("say where to: either --to-topic NAME or --same-topic")
    from outbox_pipelines.replay import replays
    from outbox_pipelines.replay.replay_topics import SAME, check
    from outbox_pipelines.replay.selection import Selection

    chosen: dict[str, Any] = {each.name: given[each.name] for each in dataclasses.fields(Selection)}
    selection = Selection(**{name: value for name, value in chosen.items() if value})
    target = given["to_topic"] or SAME
    check(target)
    if given["dry_run"]:
        with _selecting():
            _show(*replays.preview(settings, selection, target), with_topic=bool(targets))
        return
    if given["reason"] is None:
        raise SetupError("say why: --reason is required, it is recorded")
    from outbox_pipelines.cli.dead_letters import actor

    with until_signal() as stop, _selecting():
        _end(
            replays.begin(
                settings,
                selection,
                target,
                reason=given["reason"],
                actor=actor(),
                creates=given["creates"],
                rate=given["rate"],
                is_stopped=stop.is_set,
                progress=_say,
            )
        )


def _resume(settings: Settings, given: dict[str, Any]) -> None:
    from outbox_pipelines.replay import replays

    if others := [name for name, value in given.items() if value and name not in ("resume", "rate")]:
        raise SetupError(f"--resume continues with what is recorded: omit {_OPTIONS[others[0]]}")
    with until_signal() as stop, _selecting():
        _end(
            replays.resume(
                settings, given["resume"], rate=given["rate"], is_stopped=stop.is_set, progress=_say
            )
        )


@replay.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def list_replays(settings: Settings, as_json: bool) -> None:
    """List replays, the newest first."""
    from outbox_pipelines.replay.replay_record import recorded

    found = recorded(settings)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in found], indent=2, default=str))
        return
    for each in found:
        click.echo(plain(line(each)))
        _note(each.notes)


@replay.command("cancel")
@click.argument("replay_id", metavar="ID", type=click.UUID)
@click.pass_obj
def cancel_replay(settings: Settings, replay_id: UUID) -> None:
    """Cancel a replay: it ends, and cannot be resumed. Events that were sent stay in their topics."""
    from outbox_pipelines.replay.replay_record import cancel

    click.echo(plain(line(cancel(settings, replay_id))))


def line(found: Replay) -> str:
    """Return a line about a replay."""
    state = "stands still" if found.stands_still else found.state
    what = "  ".join(f"{name}={_listed(value)}" for name, value in found.selection.items())
    return (
        f"{found.started_at:%Y-%m-%d %H:%M:%S}  {found.id}  {state}  "
        f"{found.sent:,} of {found.events:,} sent to {found.target}  {what}  "
        f"by {found.on_behalf_of or found.actor}: {short(found.reason)}"
        + (f"  ({found.error})" if found.error else "")
    )


def _listed(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _note(notes: list[str]) -> None:
    for note in notes:
        click.echo(f"  note: {note}")


def _show(found: list[Counted], notes: list[str], *, with_topic: bool) -> None:
    for each in found:
        to = f"to {each.topic}  " if with_topic else ""
        what = f"{each.event_type} of {each.aggregate_type}"
        click.echo(plain(f"{each.day}  {each.events:>12,}  {what}  {to}such as {each.example}"))
    _note(notes)
    click.echo(f"{counted(sum(each.events for each in found), 'event')}, nothing sent")


def _say(found: Replay, sent: int, trouble: str) -> None:
    waits = f"; waiting for Kafka: {trouble}" if trouble else ""
    log.say(f"{sent:,} of {found.events:,} events sent{waits}", sent=sent)


def _end(found: Replay) -> None:
    click.echo(plain(line(found)))
    _note(found.notes)
    if found.state == "stopped":
        click.echo(f"outbox: stopped: continue with `outbox replay --resume {found.id}`", err=True)
    if found.state != "done":
        sys.exit(1)


@contextmanager
def _selecting() -> Iterator[None]:
    """Let the command exit with 1 if nothing is selected."""
    from outbox_pipelines.replay.replays import NothingSelectedError

    try:
        yield
    except NothingSelectedError as error:
        raise NotReadyError(str(error)) from None
