"""The command `outbox table clean`."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from typing import Final

import click

from outbox_pipelines.core.signals import set_from_handler
from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@click.command("clean")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def clean_table(settings: Settings, as_json: bool) -> None:
    """Remove rows that were published OUTBOX_CLEAN_AFTER_HOURS ago, and months that have only such rows.

    Rows are archived in OUTBOX_ARCHIVE first, with a proof (none: they are not). Pending rows and dead
    letters stay. Batches are small: none holds a lock for more than 50 ms. Ctrl-C ends after the current one.
    """
    from outbox_pipelines.existing.cleaning.clean import clean

    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: set_from_handler(stop)) for number in _SIGNALS}
    try:
        cleaned = clean(settings, stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(cleaned), indent=2))
        return
    longest = f", the longest batch in {cleaned.longest * 1000:.0f} ms" if cleaned.deleted else ""
    click.echo(plain(f"{cleaned.table}: {cleaned.deleted:,} rows deleted{longest}"))
    lines = [f"  dropped {name}" for name in cleaned.dropped]
    lines += [f"  archived in {name}" for name in cleaned.files]
    lines += [f"  note: {note}" for note in cleaned.notes]
    for line in lines:
        click.echo(plain(line))
