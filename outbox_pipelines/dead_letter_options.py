"""What the commands for dead letters have in common, those of the relay's and those of consumers."""

from __future__ import annotations

import functools
import json
import os
import pwd
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

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
            self.fail(f"{value!r}: write 2026-11-21T14:00 (UTC), or 30m, 2h, 7d for so long ago")
        return found if found.tzinfo else found.replace(tzinfo=UTC)


def wrapped(command: Command, options: list[Option]) -> Command:
    """The command with these options, shown in this order."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def actions(command: Command, filters: Option) -> Command:
    """The options of `replay` and `discard`, with those that say which dead letters are meant."""
    options: list[Option] = [
        click.argument("ids", nargs=-1, type=click.UUID, metavar="[ID]..."),
        filters,
        click.option(
            "--all", "everything", is_flag=True, help="All of them; else name ids or give a filter."
        ),
        click.option("--reason", required=True, help="Why; it stands in the audit."),
        click.option("--dry-run", is_flag=True, help="Say how many it would be; change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.pass_obj,
    ]
    return wrapped(command, options)


def act(
    action: str,
    found: Callable[[], int],
    done: Callable[[], int],
    *,
    is_everything: bool,
    everything: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Asks, acts and tells; exit code 1 where there was nothing to act on.

    Args:
        found: how many are meant.
        done: acts; how many they were.
        is_everything: whether nothing says which ones are meant.
    """
    if is_everything is not everything:
        raise click.UsageError("name ids, or give a filter, or say --all (and nothing else)")
    if not reason.strip():
        raise click.UsageError("--reason is empty: say why, it stands in the audit")
    count = found()
    if count and not (dry_run or yes):
        if not sys.stdin.isatty():
            raise click.UsageError(f"{action} {count:,} dead letters? Say --yes where nobody can be asked")
        click.confirm(f"{action} {count:,} dead letters?", abort=True, err=True)
    number = 0 if dry_run else done()
    if as_json:
        click.echo(json.dumps({"action": action, "dry_run": dry_run, "found": count, "done": number}))
    elif dry_run:
        click.echo(f"{count:,} dead letters would be {_PAST[action]}")
    else:
        click.echo(f"{number:,} dead letters {_PAST[action]}")
    if not (count if dry_run else number):
        sys.exit(1)


def actor() -> str:
    """Who types, for the audit: the process's user, whatever LOGNAME says."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
