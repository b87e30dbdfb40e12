"""The commands `outbox dead-letters …`: what an operator types when events could not be published."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import json
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import click

from outbox_pipelines.settings import Settings

Command = Callable[..., Any]
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class _Time(click.ParamType[datetime]):
    name = "time"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            if value[-1:] in _UNITS and value[:-1].isdigit():
                return datetime.now(UTC) - timedelta(**{_UNITS[value[-1]]: int(value[:-1])})
            found = datetime.fromisoformat(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r}: write 2026-11-21T14:00 (UTC), or 30m, 2h, 7d for so long ago")
        return found if found.tzinfo else found.replace(tzinfo=UTC)


def _wrapped(command: Command, options: list[Callable[[Command], Command]]) -> Command:
    """The command with these options, shown in this order."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def _filters(command: Command) -> Command:
    """The options that say which dead letters are meant."""
    options: list[Callable[[Command], Command]] = [
        click.option("--event-type", help="Of this event type."),
        click.option("--aggregate-type", help="Of this aggregate type."),
        click.option("--aggregate-id", help="Of the aggregate with this id."),
        click.option("--error", metavar="TEXT", help="Whose reason contains this."),
        click.option("--since", type=_Time(), help="Failed since then: 2026-11-21T14:00 (UTC), 30m, 2h, 7d."),
        click.option("--until", type=_Time(), help="Failed until then."),
    ]
    return _wrapped(command, options)


def _actions(command: Command) -> Command:
    """What `replay` and `discard` have in common."""
    options: list[Callable[[Command], Command]] = [
        click.argument("ids", nargs=-1, type=click.UUID, metavar="[ID]..."),
        _filters,
        click.option(
            "--all", "everything", is_flag=True, help="All of them; else name ids or give a filter."
        ),
        click.option("--reason", required=True, help="Why; it stands in the audit."),
        click.option("--dry-run", is_flag=True, help="Say how many it would be; change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.pass_obj,
    ]
    return _wrapped(command, options)


@click.group("dead-letters")
def dead_letters() -> None:
    """Events that could not be published: list, show, replay, discard."""


@dead_letters.command("list")
@_filters
@click.option("--discarded", is_flag=True, help="Those that were discarded, instead.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="Rows at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def list_(settings: Settings, /, discarded: bool, limit: int, as_json: bool, **given: Any) -> None:
    """List dead letters, the newest first, with their number by reason."""
    from outbox_pipelines.relay.dead_letters import Filter, find

    found = find(settings, Filter(**given), limit=limit, discarded=discarded)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2, default=_text))
        return
    if not found.total:
        click.echo("none")
        return
    for row in found.rows:
        click.echo(
            f"{row.failed_at:%Y-%m-%d %H:%M:%S}  {row.id}  {row.event_type}  {row.aggregate_type} "
            f"{row.aggregate_id}  {row.attempts} attempts  {row.error}"
        )
    if found.total > len(found.rows):
        click.echo(f"… and {found.total - len(found.rows):,} more (--limit)")
    click.echo()
    for error, count in found.by_error.items():
        click.echo(f"{count:>8,} × {error}")


@dead_letters.command()
@click.argument("event_id", metavar="ID", type=click.UUID)
@click.pass_obj
def show(settings: Settings, event_id: UUID) -> None:
    """Show everything of one dead letter or parked event, as JSON: content, reason, what was done to it."""
    from outbox_pipelines.relay import dead_letters

    found = dead_letters.show(settings, event_id)
    if found is None:
        click.echo(f"outbox: {event_id} is neither parked nor a dead letter", err=True)
        sys.exit(1)
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


@dead_letters.command()
@_actions
def replay(settings: Settings, /, **given: Any) -> None:
    """Let the relay try dead letters again: each once, at once.

    One that is refused again is a dead letter again, with the new reason. Later events of its aggregate are
    out already, unless OUTBOX_ON_DEAD_LETTER=block: consumers see the replayed one late.
    """
    _act(settings, "replay", **given)


@dead_letters.command()
@_actions
def discard(settings: Settings, /, **given: Any) -> None:
    """Give dead letters up: they are not published, and no alarm counts them. Their content is kept."""
    _act(settings, "discard", **given)


def _act(
    settings: Settings,
    action: Any,
    *,
    ids: tuple[UUID, ...],
    everything: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **given: Any,
) -> None:
    from outbox_pipelines.relay.dead_letters import Filter, act, find

    which = Filter(ids=ids, **given)
    if which.is_empty is not everything:
        raise click.UsageError("name ids, or give a filter, or say --all (and nothing else)")
    if not reason.strip():
        raise click.UsageError("--reason is empty: say why, it stands in the audit")
    count = find(settings, which, limit=1).total
    if count and not (dry_run or yes):
        if not sys.stdin.isatty():
            raise click.UsageError(f"{action} {count:,} dead letters? Say --yes where nobody can be asked")
        click.confirm(f"{action} {count:,} dead letters?", abort=True, err=True)
    done = 0 if dry_run else act(settings, action, which, actor=actor(), reason=reason)
    if as_json:
        click.echo(json.dumps({"action": action, "dry_run": dry_run, "found": count, "done": done}))
    elif dry_run:
        click.echo(f"{count:,} dead letters would be {_past(action)}")
    else:
        click.echo(f"{done:,} dead letters {_past(action)}")
    if not (count if dry_run else done):
        sys.exit(1)


def actor() -> str:
    """Who types, for the audit."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _past(action: str) -> str:
    return {"replay": "replayed", "discard": "discarded"}[action]


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
