"""The commands `outbox delayed …`: events that are not due yet, or that are due and were not moved."""

from __future__ import annotations

import dataclasses
import json
import sys
from uuid import UUID

import click

from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.config import parsed
from outbox_pipelines.core.text import counted, plain, short
from outbox_pipelines.settings import Settings


@click.group()
def delayed() -> None:
    """List and cancel delayed events; move those that are due into the outbox."""


@delayed.command("list")
@click.option("--overdue", is_flag=True, help="Only those that are due.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="Maximum rows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def list_delayed(settings: Settings, overdue: bool, limit: int, as_json: bool) -> None:
    """List delayed events, the next due first, and why an event could not be moved or who holds it."""
    from outbox_pipelines.relay.parking import delayed_event_store

    parsed.refuse_existing_table(settings)
    found = delayed_event_store.find(settings, overdue=overdue, limit=limit)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2, default=str))
        return
    for row in found.rows:
        waits = "  later events wait" if row.later_events_wait else ""
        reason = f"  in {row.held_by}" if row.held_by else f"  {row.last_error}" if row.last_error else ""
        line = (
            f"{row.due:%Y-%m-%d %H:%M:%S}  {row.id}  {short(row.event_type)}  {short(row.aggregate_type)} "
            f"{short(row.aggregate_id)}{waits}{reason}"
        )
        click.echo(plain(line))
    if found.total > len(found.rows):
        click.echo(f"… and {found.total - len(found.rows):,} more (--limit)")
    if not found.total:
        click.echo("none")


@delayed.command()
@click.argument("ids", nargs=-1, required=True, type=click.UUID, metavar="ID...")
@click.option("--reason", type=TEXT, required=True, help="Reason, for the audit.")
@click.pass_obj
def cancel(settings: Settings, ids: tuple[UUID, ...], reason: str) -> None:
    """Remove delayed events: they are never published. Events that waited only for them are due at once.

    Exits with 1 if one of them is not delayed (any more); the others are canceled.
    """
    from outbox_pipelines.cli.dead_letters import actor
    from outbox_pipelines.relay.parking import delayed_event_store

    parsed.refuse_existing_table(settings)
    canceled = delayed_event_store.cancel(settings, ids, reason=reason, actor=actor())
    click.echo(f"{counted(canceled, 'delayed event')} canceled")
    if canceled < len({*ids}):
        sys.exit(1)


@delayed.command()
@click.pass_obj
def move(settings: Settings) -> None:
    """Move due events into the outbox now, also those that could not be moved before.

    Each active relay does this about once a second. Run it every minute where Debezium publishes. Exits with
    1 if events are left that are due.
    """
    from outbox_pipelines.relay.parking import delayed_event_store

    parsed.refuse_existing_table(settings)
    moved, left = delayed_event_store.move(settings)
    if not left:
        click.echo(f"{counted(moved, 'event')} moved")
        return
    due = delayed_event_store.find(settings, overdue=True, limit=50).rows
    held = next((f"; {row.id} is in {row.held_by}" for row in due if row.held_by), "")
    click.echo(plain(f"{counted(moved, 'event')} moved, {left:,} left: see `outbox delayed list`{held}"))
    sys.exit(1)
