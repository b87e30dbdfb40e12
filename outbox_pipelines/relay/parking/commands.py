"""The commands `outbox dead-letters …`: what an operator types when events could not be published."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from outbox_pipelines.dead_letter_options import Command, Option, Time, act, actions, actor, wrapped
from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain, to_json


def _filters(command: Command) -> Command:
    """The options that say which dead letters are meant."""
    options: list[Option] = [
        click.option("--event-type", help="Of this event type."),
        click.option("--aggregate-type", help="Of this aggregate type."),
        click.option("--aggregate-id", help="Of the aggregate with this id."),
        click.option("--error", metavar="TEXT", help="Whose reason contains this."),
        click.option("--since", type=Time(), help="Failed since then: 2026-11-21T14:00 (UTC), 30m, 2h, 7d."),
        click.option("--until", type=Time(), help="Failed until then."),
    ]
    return wrapped(command, options)


def _actions(command: Command) -> Command:
    return actions(command, _filters)


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
    from outbox_pipelines.relay.parking.dead_letters import Filter, find

    found = find(settings, Filter(**given), limit=limit, discarded=discarded)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2, default=_text))
        return
    if not found.total:
        click.echo("none")
        return
    for row in found.rows:
        click.echo(
            plain(
                f"{row.failed_at:%Y-%m-%d %H:%M:%S}  {row.id}  {row.event_type}  {row.aggregate_type} "
                f"{row.aggregate_id}  {row.attempts} attempts  {row.error}"
            )
        )
    if found.total > len(found.rows):
        click.echo(f"… and {found.total - len(found.rows):,} more (--limit)")
    click.echo()
    for error, count in found.by_error.items():
        click.echo(plain(f"{count:>8,} × {error}"))


@dead_letters.command()
@click.argument("event_id", metavar="ID", type=click.UUID)
@click.pass_obj
def show(settings: Settings, event_id: UUID) -> None:
    """Show everything of one dead letter or parked event, as JSON: content, reason, what was done to it.

    If several events have the id, each is printed.
    """
    from outbox_pipelines.relay.parking import dead_letters

    found = dead_letters.show(settings, event_id)
    if not found:
        click.echo(f"outbox: {event_id} is neither parked nor a dead letter", err=True)
        sys.exit(1)
    for one in found:
        click.echo(to_json(one, indent=2))


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


def _act(settings: Settings, action: Any, *, ids: tuple[UUID, ...], reason: str, **given: Any) -> None:
    from outbox_pipelines.relay.parking import dead_letters

    how = {name: given.pop(name) for name in ("everything", "dry_run", "yes", "as_json")}
    which = dead_letters.Filter(ids=ids, **given)
    act(
        action,
        lambda: dead_letters.find(settings, which, limit=1).total,
        lambda: dead_letters.act(settings, action, which, actor=actor(), reason=reason),
        is_everything=which.is_empty,
        reason=reason,
        **how,
    )


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
