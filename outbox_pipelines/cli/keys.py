"""The commands `outbox keys …` and `outbox forget`: manage the keys of data subjects, and destroy one."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from outbox_pipelines.cli.dead_letters import actor
from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.config.master_keys import SIZE
from outbox_pipelines.core.text import counted, plain, short
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

_LISTED: Final = 50
_NAMED: Final = 10
"""Keys that a message names."""


@click.group()
def keys() -> None:
    """Manage the keys of data subjects (OUTBOX_KEYS_DSN, OUTBOX_MASTER_KEY)."""


@keys.command()
def generate() -> None:
    """Print a new master key, for OUTBOX_MASTER_KEY. Without it, all subjects are erased: keep a copy."""
    click.echo(base64.b64encode(os.urandom(SIZE)).decode())


@keys.command("migrate")
@click.pass_obj
def make_tables(settings: Settings) -> None:
    """Create the missing tables of the key store, and check that the master key is its own.

    Warns if the keys are in the same server as the outbox (OUTBOX_DSN).
    """
    from outbox_pipelines.subject_keys import erasures

    with _errors():
        is_new, warning = erasures.migrate(settings)
    done = "created" if is_new else "exist"
    click.echo(f"tables of the key store: {done}; the master key is its own")
    if warning:
        click.echo(plain(f"outbox: {warning}"), err=True)


@keys.command("list")
@click.option("--limit", type=click.IntRange(1), help="Maximum rows (default: 50; with --json, all).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def list_erasures(settings: Settings, limit: int | None, as_json: bool) -> None:
    """List the subjects that were forgotten, newest first: who did it, when and why."""
    from outbox_pipelines.subject_keys import erasures

    with _errors():
        found = erasures.erasures(settings, limit or (None if as_json else _LISTED))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in found], indent=2, default=str))
        return
    for each in found:
        when = f"{each.forgotten_at:%Y-%m-%d %H:%M:%S}"
        click.echo(plain(f"{when}  {each.subject}  {short(each.forgotten_by)}  {short(each.reason)}"))
    if not found:
        click.echo("none")


@keys.command()
@click.pass_obj
def rewrap(settings: Settings) -> None:
    """Make the first master key in OUTBOX_MASTER_KEY the current one, and wrap all keys with it.

    Every process needs both, in any order. After the command, the former one is needed no more, except for
    older backups. Exits with 1 if a key cannot be unwrapped.
    """
    from outbox_pipelines.subject_keys import erasures

    with _errors():
        done = erasures.rewrap(settings)
    click.echo(f"{counted(done.count, 'key')} wrapped by the current master key")
    for left, why in (
        (
            done.missing,
            "wrapped by a master key that is not given: add it behind the current one, and run the command "
            "again",
        ),
        (
            done.damaged,
            "damaged, and unreadable: restore these rows of subject_keys from a backup, or delete them: the "
            "subjects then get other keys",
        ),
    ):
        if left:
            named = ", ".join(f"{subject} ({key_id})" for subject, key_id in left[:_NAMED])
            more = f", and {len(left) - _NAMED:,} more" if len(left) > _NAMED else ""
            click.echo(plain(f"outbox: {counted(len(left), 'key')} {why}: {named}{more}"), err=True)
    if done.missing or done.damaged:
        sys.exit(1)


@click.command()
@click.argument("subject", type=TEXT)
@click.option("--reason", type=TEXT, required=True, help="Reason, for the audit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def forget(settings: Settings, subject: str, reason: str, as_json: bool) -> None:
    """Destroy the key of a data subject: its encrypted values become unreadable everywhere.

    Processes that have the key in memory read them for at most 60 seconds more. Repeated, the command
    changes nothing. Exits with 1 if the subject has no key.
    """
    from outbox_pipelines.subject_keys import erasures

    with _errors():
        found = erasures.forget(settings, subject, actor=actor(), reason=reason)
    if found is None:
        click.echo(
            plain(f"outbox: no key of the subject {subject}: nothing was destroyed. Check the id"), err=True
        )
        sys.exit(1)
    erasure, is_new, left = found
    if as_json:
        one = dataclasses.asdict(erasure) | {"is_new": is_new}
        click.echo(json.dumps(one, indent=2, default=str))
    else:
        when = "now" if is_new else f"already, {erasure.forgotten_at:%Y-%m-%d %H:%M:%S} UTC"
        by, why = short(erasure.forgotten_by), short(erasure.reason)
        click.echo(plain(f"{subject} forgotten {when}, by {by}: {why}"))
    if left:
        click.echo(
            plain(f"outbox: the next autovacuum removes the row's former version with the key: {left}"),
            err=True,
        )


@contextmanager
def _errors() -> Iterator[None]:
    from outbox_pipelines.subject_keys import KeyStoreError

    try:
        yield
    except KeyStoreError as error:
        raise SetupError(str(error)) from None
