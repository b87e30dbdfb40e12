"""The commands `outbox dead-letters …`, also for consumers with the same options, and `outbox delayed …`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pwd
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.config import parsed
from outbox_pipelines.core.text import counted, plain, short, to_json
from outbox_pipelines.relay import kinds
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.relay.kinds import Store
    from outbox_pipelines.relay.parking.dead_letter_store import DeadLetterRow

Command = Callable[..., Any]
Option = Callable[[Command], Command]
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_PAST = {"replay": "replayed", "discard": "discarded"}


class Time(click.ParamType[datetime]):
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
            self.fail(f"{value!r}: write a time (2026-11-21T14:00, UTC) or an age (30m, 2h, 7d)")
        return found if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Texts:
    """The help texts of the commands."""

    group: str
    show: str
    replay: str
    discard: str
    unknown: str
    """The message for an unknown id: ``{}``."""


def make_group(
    store: Callable[[Settings], AbstractContextManager[Store]],
    texts: Texts,
    filters: Sequence[Option],
    line: Callable[[Any], str],
    id_type: click.ParamType[Any] = click.UUID,
) -> click.Group:
    """Return the commands list, show, replay and discard for dead letters.

    Args:
        filters: the options that select dead letters, in addition to reason and time.
        line: formats a row for `list`.
        id_type: the type of ids.
    """
    which = _joined(
        *filters,
        click.option("--error", type=TEXT, help="Only those whose reason contains TEXT."),
        click.option("--since", type=Time(), help="Failed since: 2026-11-21T14:00 (UTC), 30m, 2h, 7d."),
        click.option("--until", type=Time(), help="Failed until."),
    )
    acting = _joined(
        click.argument("ids", nargs=-1, type=id_type, metavar="[ID]..."),
        which,
        click.option("--all", "everything", is_flag=True, help="All, or all that the filter selects."),
        click.option("--reason", type=TEXT, required=True, help="Reason, for the audit."),
        click.option("--dry-run", is_flag=True, help="Print how many match; change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.pass_obj,
    )

    @click.group("dead-letters", help=texts.group)
    def group() -> None: ...

    @group.command("list")
    @which
    @click.option("--discarded", is_flag=True, help="Show discarded ones instead.")
    @click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="Maximum rows.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @click.pass_obj
    def list_(settings: Settings, /, discarded: bool, limit: int, as_json: bool, **given: Any) -> None:
        """List dead letters, newest first, and count them by reason."""
        with store(settings) as letters:
            found = letters.find(given, limit=limit, discarded=discarded)
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(found), indent=2, default=_text))
            return
        if not found.total:
            click.echo("none")
            return
        for row in found.rows:
            click.echo(plain(line(row)))
        if found.total > len(found.rows):
            click.echo(f"… and {found.total - len(found.rows):,} more (--limit)")
        click.echo()
        for error, count in found.by_error.items():
            click.echo(plain(f"{count:>8,} × {error}"))

    @group.command(help=texts.show)
    @click.argument("letter", metavar="ID", type=id_type)
    @click.pass_obj
    def show(settings: Settings, letter: Any) -> None:
        with store(settings) as letters:
            found = letters.show(letter)
        if not found:
            click.echo(f"outbox: {texts.unknown.format(letter)}", err=True)
            sys.exit(1)
        for one in found:
            click.echo(to_json(one, indent=2))

    @group.command(help=texts.replay)
    @acting
    def replay(settings: Settings, /, **given: Any) -> None:
        _act(store, settings, "replay", **given)

    @group.command(help=texts.discard)
    @acting
    def discard(settings: Settings, /, **given: Any) -> None:
        _act(store, settings, "discard", **given)

    return group


def _joined(*options: Option) -> Option:
    """Combine several decorators into one; help shows the options in this order."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)

    return decorate


def _act(
    store: Callable[[Settings], AbstractContextManager[Store]],
    settings: Settings,
    action: str,
    *,
    everything: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Confirm, act and report; exit with 1 if nothing matched."""
    if everything and given["ids"]:
        raise click.UsageError("name ids or use --all, not both")
    if not everything and not any(given.values()):
        raise click.UsageError("name ids, give a filter, or use --all")
    with store(settings) as letters:
        letters.check_action(action, given)
        count = letters.find(given, limit=1, discarded=False).total
        if count and not (dry_run or yes):
            if not sys.stdin.isatty():
                raise click.UsageError(
                    f"{action} {counted(count, 'dead letter')}? Without a terminal, add --yes"
                )
            click.confirm(f"{action} {counted(count, 'dead letter')}?", abort=True, err=True)
        number = 0 if dry_run else letters.act(action, given, actor=actor(), reason=reason)
    if as_json:
        click.echo(json.dumps({"action": action, "dry_run": dry_run, "found": count, "done": number}))
    elif dry_run:
        click.echo(f"{counted(count, 'dead letter')} would be {_PAST[action]}")
    else:
        click.echo(f"{counted(number, 'dead letter')} {_PAST[action]}")
    if not (count if dry_run else number):
        sys.exit(1)


def actor() -> str:
    """Return the process's user and host, for the audit; LOGNAME is not used."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


@contextmanager
def _table(settings: Settings) -> Iterator[Store]:
    yield kinds.of(settings).dead_letters(settings)


def _line_of_relay(row: DeadLetterRow) -> str:
    when = row.failed_at or row.created_at
    return (
        f"{f'{when:%Y-%m-%d %H:%M:%S}' if when else '-'}  {row.id}  {short(row.event_type)}  "
        f"{short(row.aggregate_type)} {short(row.aggregate_id)}  "
        f"{'-' if row.attempts is None else counted(row.attempts, 'attempt')}  {row.error}"
    )


dead_letters = make_group(
    _table,
    Texts(
        group="""Events that could not be published: list, show, replay, discard.

        An existing table (OUTBOX_TABLE) has no audit and no discarded events.
        """,
        show="""Show everything of one dead letter or parked event, as JSON: content, reason, audit.

        If several events have the id, each is printed.
        """,
        replay="""Let the relay try dead letters again: each once, immediately.

        One that is refused again is a dead letter again, with the new reason. Later events of its aggregate
        have been published already, unless OUTBOX_ON_DEAD_LETTER=block: consumers see the replayed one late.
        """,
        discard="""Discard dead letters: they are not published, and no alert counts them.

        Their content is kept, but they cannot be replayed.
        """,
        unknown="{} is neither parked nor a dead letter",
    ),
    [
        click.option("--event-type", type=TEXT, help="Of this event type."),
        click.option("--aggregate-type", type=TEXT, help="Of this aggregate type."),
        click.option("--aggregate-id", type=TEXT, help="Of the aggregate with this id."),
    ],
    _line_of_relay,
    # An existing table has ids of any kind.
    TEXT,
)


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
    from outbox_pipelines.relay.parking import delayed_events

    parsed.refuse_existing_table(settings)
    found = delayed_events.find(settings, overdue=overdue, limit=limit)
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
    from outbox_pipelines.relay.parking import delayed_events

    parsed.refuse_existing_table(settings)
    canceled = delayed_events.cancel(settings, ids, reason=reason, actor=actor())
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
    from outbox_pipelines.relay.parking import delayed_events

    parsed.refuse_existing_table(settings)
    moved, left = delayed_events.move(settings)
    if not left:
        click.echo(f"{counted(moved, 'event')} moved")
        return
    due = delayed_events.find(settings, overdue=True, limit=50).rows
    held = next((f"; {row.id} is in {row.held_by}" for row in due if row.held_by), "")
    click.echo(plain(f"{counted(moved, 'event')} moved, {left:,} left: see `outbox delayed list`{held}"))
    sys.exit(1)
