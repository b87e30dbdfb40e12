"""The command `outbox relay`: one outbox, or several in one process."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

import click

from outbox_pipelines.cli.options import TEXT, chosen_list
from outbox_pipelines.core import log
from outbox_pipelines.core.signals import until_signal
from outbox_pipelines.core.text import counted
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.outboxes import Outboxes
from outbox_pipelines.relay import kinds
from outbox_pipelines.settings import Settings


@click.command()
@click.option(
    "--until-empty",
    is_flag=True,
    help="Publish what is committed at the start, then exit 0, or 1 if any event is parked or a dead letter.",
)
@click.option("--shard", type=click.IntRange(0), help="Shard to relay (default: the first free one).")
@click.option(
    "--delivery",
    type=click.Choice(["at_least_once", "exactly_once"]),
    help="Override OUTBOX_DELIVERY. exactly_once publishes in Kafka transactions.",
)
@click.option(
    "--rebase",
    is_flag=True,
    help="Adopt an outbox that was restored from a dump or copied, or whose sequence was set back: loses "
    "nothing, may duplicate. "
    "Run it before any writer starts.",
)
@click.option(
    "--start-at",
    metavar="START",
    type=TEXT,
    help="Where the first relay of an outbox begins: now, beginning (the default), a time with its zone, "
    "slot:NAME (what Debezium, which read this slot, has not published), or a pg_snapshot. Refused once the "
    "outbox has been relayed.",
)
@click.option("--all", "of_all", is_flag=True, help="Relay all outboxes of outbox.toml.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics on this port of OUTBOX_METRICS_ADDRESS (default 127.0.0.1); 0: any port.",
)
@click.pass_context
def relay(
    context: click.Context,
    until_empty: bool,
    shard: int | None,
    delivery: str | None,
    rebase: bool,
    start_at: str | None,
    of_all: bool,
    metrics_port: int | None,
) -> None:
    """Relay committed events to Kafka, until stopped by Ctrl-C or SIGTERM.

    If another relay owns the shard, this one waits as its standby; with --until-empty it names the owner and
    exits 1. An event that Kafka refuses is parked, together with the later events of its aggregate: see
    `outbox status` and `outbox dead-letters`.

    With --all, or with several --outbox, one process relays several outboxes. Several such processes divide
    the outboxes among themselves.
    """
    outboxes, names = chosen_list(context)
    if of_all and names:
        raise SetupError("--outbox names outboxes and --all asks for every one: omit one of them")
    changes = {"delivery": delivery, "metrics_port": metrics_port}
    changes = {name: value for name, value in changes.items() if value is not None}
    if of_all or len(names) > 1:
        if until_empty or rebase or start_at is not None or shard is not None:
            raise SetupError(
                "--until-empty, --shard, --rebase and --start-at are for one outbox: name it with --outbox"
            )
        _relay_all(outboxes, names, changes)
        return
    settings = outboxes.get(names[0] if names else None).model_copy(update=changes)
    for option, is_given in (("--rebase", rebase), ("--shard", shard is not None)):
        if is_given and not kinds.of(settings).has_positions:
            raise SetupError(f"{option}: an existing table (OUTBOX_TABLE) has no position and no shards")
    if rebase:
        _rebase(settings)
    if start_at is not None:
        _start_at(settings, start_at)
    _relay_one(settings, until_empty=until_empty, shard=shard)


def _relay_all(outboxes: Outboxes, names: list[str], changes: dict[str, Any]) -> None:
    from outbox_pipelines.relay.fleet import relay_all
    from outbox_pipelines.relay.telemetry import observers

    for name in names:
        # A name that was mistyped is an error of the command, not of an outbox.
        if name not in outboxes.errors:
            outboxes.get(name)
    wanted = {name: settings for name, settings in outboxes.settings.items() if not names or name in names}
    errors = {name: why for name, why in outboxes.errors.items() if not names or name in names}
    if not names:
        for line in outboxes.shared_tables():
            click.echo(f"outbox: {line}", err=True)
    all_settings = [settings.model_copy(update=changes) for settings in wanted.values()]
    with until_signal() as stop, closing(observers):
        totals = relay_all.relay_all(
            all_settings,
            stop=stop,
            errors=errors,
            on_take=lambda outbox, shard: log.say(f"shard {shard} taken", shard=shard),
            on_serve=lambda url: log.say(f"metrics at {url}", url=url),
        )
    log.say(f"published {counted(totals.events, 'event')}", events=totals.events)


def _relay_one(settings: Settings, *, until_empty: bool, shard: int | None) -> None:
    from outbox_pipelines.relay import service
    from outbox_pipelines.relay.telemetry import metrics, observers

    try:
        with (
            until_signal() as stop,
            closing(observers),
            metrics.serving(settings, lambda url: log.say(f"metrics at {url}", url=url)) as counting,
        ):
            totals = service.relay(
                settings,
                shard=shard,
                stop=stop,
                until_empty=until_empty,
                standby=service.Standby.REFUSE if until_empty else service.Standby.ANY,
                on_take=lambda taken: log.say(f"shard {taken} taken", shard=taken),
                metrics=counting,
            )
    except service.ShardOwnedError as error:
        raise NotReadyError(str(error)) from None
    log.say(
        f"published {counted(totals.events, 'event')} in {totals.seconds:.1f} s",
        events=totals.events,
        seconds=round(totals.seconds, 3),
    )
    if until_empty and totals.unpublished:
        click.echo(
            f"outbox: {counted(totals.unpublished, 'event')} could not be published (parked, or a dead "
            "letter): see `outbox status`",
            err=True,
        )
        if totals.paused:
            click.echo(
                f"outbox: a relay crashed while it tried {totals.paused} of them: the next attempt is due in "
                f"{totals.paused_seconds:.0f} s; after three crashes such an event becomes a dead letter",
                err=True,
            )
        sys.exit(1)


def _rebase(settings: Settings) -> None:
    from outbox_pipelines.relay.lease.rebase import rebase

    found = rebase(settings)
    if found is None:
        log.say("position and sequence are those of this database: nothing to rebase")
        return
    if found.raised is not None:
        was, now = found.raised
        log.say(f"the sequence outbox_seq was behind: raised from {was:,} to {now:,}", was=was, now=now)
    if found.renumbered:
        log.say(
            f"new numbers (seq) for {counted(found.renumbered, 'unpublished event')}",
            renumbered=found.renumbered,
        )
    if found.published is None:
        return
    log.say(
        "the position was made in another database, whose transaction ids mean nothing here. By it "
        f"{found.published:,} events are published; the other {found.waiting:,} will be published now, "
        "again if they were after the dump was taken",
        published=found.published,
        waiting=found.waiting,
    )


def _start_at(settings: Settings, where: str) -> None:
    from outbox_pipelines.relay.start import start_at

    start = start_at(settings, where)
    if start is None:
        log.say("the outbox is published from its beginning")
        return
    log.say(
        f"the outbox is published from snapshot {start.snapshot}; {counted(start.skipped, 'event')} before "
        "it counted as published",
        snapshot=start.snapshot,
        skipped=start.skipped,
    )
