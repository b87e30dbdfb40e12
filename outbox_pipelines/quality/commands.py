"""The command `outbox alerts …`."""

from __future__ import annotations

import sys

import click

from outbox_pipelines.settings import Settings


@click.group()
def alerts() -> None:
    """Alerts (OUTBOX_ALERTS), which Dagster's sensor `alerts` sends."""


@alerts.command("test")
@click.pass_obj
def test(settings: Settings) -> None:
    """Send a test message to every address. Exits with 1 if an address does not accept it."""
    from outbox_pipelines.quality import delivery
    from outbox_pipelines.quality.alerts import Message, where

    title = f"{where(settings)}: a test"
    outcomes = delivery.send(
        settings, [Message(title, "Alerts of this outbox arrive here. No action is needed.", True)]
    )
    failed = [each for each in outcomes if each.unsent]
    for each in failed:
        click.echo(f"outbox: {each.address} did not accept the message: {each.why}", err=True)
    if failed:
        sys.exit(1)
    click.echo(f"sent to {len(outcomes)}")
