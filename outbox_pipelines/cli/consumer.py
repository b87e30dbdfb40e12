"""The commands `outbox consumer …`: run consumers and manage their inbox tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from outbox_pipelines.cli.dead_letters import Command, Texts, make_group
from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.core import log
from outbox_pipelines.core.text import counted, plain, short
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.consumer.administration import DeadLetterRow
    from outbox_pipelines.consumer.inbox import Backlog
    from outbox_pipelines.consumer.loading import AnyConsumer
    from outbox_pipelines.relay.kinds import Store

_MOST_PAUSED: Final = 20


@click.group()
def consumer() -> None:
    """Manage idempotent consumers (database OUTBOX_CONSUMER_DSN, schema OUTBOX_CONSUMER_SCHEMA)."""


@consumer.command("migrate")
@click.pass_obj
def make_tables(settings: Settings) -> None:
    """Create the consumer's missing tables; existing ones do not change."""
    from outbox_pipelines.consumer import administration

    with _connected(settings, checks=False) as connection:
        administration.migrate(connection)
    click.echo("the consumer's tables exist")


@consumer.command("prune")
@click.option(
    "--keep-days",
    "days",
    type=click.IntRange(1, 50),
    required=True,
    help="Keep events processed in the last N days; must exceed the retention of the Kafka topics.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def prune_rows(settings: Settings, days: int, as_json: bool) -> None:
    """Delete the records of events that were processed long ago. Run it every day.

    An event that arrives again after its record is deleted is handled again.
    """
    from outbox_pipelines.consumer import administration

    with _connected(settings) as connection:
        pruned = administration.prune(connection, timedelta(days=days))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(pruned)))
        return
    busy = f"; {len(pruned.busy)} in use were left for the next run" if pruned.busy else ""
    click.echo(
        f"{counted(len(pruned.emptied), 'day')} emptied, {counted(pruned.deleted, 'row')} without a day and "
        f"{counted(pruned.deleted_messages, 'inbox row')} deleted{busy}"
    )


@consumer.command()
@click.argument("name", metavar="[MODULE:NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(settings: Settings, name: str | None, as_json: bool) -> None:
    """Show the backlog, the paused handlers and the dead letters of the inboxes.

    With MODULE:NAME, show this consumer's inbox in its own database, its lag in Kafka, and the event types of
    the newest messages. Warns about handlers whose event type does not occur.
    """
    from outbox_pipelines.consumer.administration import backlogs

    if name is not None:
        _show_one(name, as_json)
        return
    with _connected(settings) as connection:
        found = backlogs(connection)
    if as_json:
        click.echo(json.dumps({"inboxes": [dataclasses.asdict(each) for each in found]}))
        return
    for each in found:
        _show_inbox(each)
    if not found:
        click.echo("all inboxes are empty; no dead letters")


def _show_one(name: str, as_json: bool) -> None:
    from outbox_pipelines.consumer import loading
    from outbox_pipelines.consumer.loading import inspect

    consumer = loading.load(name)
    backlog, _ = loading.backlog(consumer)
    found = inspect(consumer)
    if as_json:
        one = {"inboxes": [dataclasses.asdict(backlog)], "kafka": dataclasses.asdict(found)}
        click.echo(json.dumps(one))
        return
    _show_inbox(backlog)
    for topic, behind in found.behind.items():
        click.echo(plain(f"{topic}: {counted(behind, 'message')} behind"))
    if not found.behind:
        click.echo("warning: topic not found")
    click.echo(f"types of the newest {counted(found.sampled, 'message')}:")
    for event_type, count in found.types.items():
        passed_over = ", no handler" if event_type in found.passed_over else ""
        click.echo(plain(f"{count:>8,} × {event_type or '(no event)'}{passed_over}"))
    for event_type, alike in found.unmatched.items():
        advice = f"; {alike!r} has no handler: check the name" if alike else ""
        click.echo(plain(f"warning: no message has the type {event_type!r}, which has a handler{advice}"))


def _show_inbox(backlog: Backlog) -> None:
    age = "" if backlog.oldest_seconds is None else f", oldest {backlog.oldest_seconds:,.0f} s"
    dead = counted(backlog.dead_letters, "dead letter")
    click.echo(plain(f"{backlog.source}: {backlog.waiting:,} waiting{age}; {dead}"))
    for each in backlog.paused[:_MOST_PAUSED]:
        event_type = short(each.event_type or "(no event)")
        click.echo(
            plain(
                f"  the handler of {event_type} is paused for {each.seconds:,.0f} s, next try in "
                f"{each.next_seconds:,.0f} s: {each.error or 'the first try has not ended'}"
            )
        )
    if (more := len(backlog.paused) - _MOST_PAUSED) > 0:
        click.echo(f"  {counted(more, 'other handler')} paused")


def _at_work(command: Command) -> Command:
    """Add the consumer's argument and the options of its metrics server."""
    command = click.option(
        "--metrics-address",
        type=TEXT,
        envvar="OUTBOX_METRICS_ADDRESS",
        default="127.0.0.1",
        show_default=True,
        help="Address that the metrics port listens on; anyone who reaches it can read the metrics.",
    )(command)
    command = click.option(
        "--metrics-port",
        envvar="OUTBOX_METRICS_PORT",
        type=click.IntRange(0, 65535),
        help="Serve Prometheus metrics on this port (requires prometheus-client); 0: any free port.",
    )(command)
    return click.argument("name", metavar="MODULE:NAME")(command)


@contextmanager
def _measured(name: str, metrics_port: int | None, metrics_address: str) -> Iterator[AnyConsumer]:
    """Load the consumer of that name, and serve its metrics if a port is given."""
    from outbox_pipelines.consumer import loading

    found = loading.load(name)
    if metrics_port is None:
        yield found
        return
    try:
        from outbox_pipelines.consumer import prometheus
    except ModuleNotFoundError as error:
        raise SetupError(f"--metrics-port requires {error.name}: pip install prometheus-client") from None
    with prometheus.serving(found, metrics_port, metrics_address) as url:
        log.say(f"metrics at {url}", url=url)
        yield found


@consumer.command()
@_at_work
def run(**given: Any) -> None:
    """Run a consumer until SIGTERM or SIGINT; it defines its own database and Kafka connections."""
    from outbox_pipelines.consumer import loading

    with _measured(**given) as found:
        click.echo(loading.run(found, "run"))


@consumer.command()
@_at_work
def receive(**given: Any) -> None:
    """Write a consumer's events into its inbox until SIGTERM or SIGINT."""
    from outbox_pipelines.consumer import loading

    with _measured(**given) as found:
        click.echo(loading.run(found, "receive"))


@consumer.command()
@_at_work
@click.option("--until-empty", is_flag=True, help="Exit when no event is due.")
def drain(until_empty: bool, **given: Any) -> None:
    """Handle the events in a consumer's inbox until SIGTERM or SIGINT; any number of processes can do so."""
    from outbox_pipelines.consumer import loading

    with _measured(**given) as found:
        click.echo(loading.drain(found, until_empty=until_empty))


@contextmanager
def _inbox(settings: Settings) -> Iterator[Store]:
    from outbox_pipelines.consumer.administration import ConsumerDeadLetters
    from outbox_pipelines.registry import SchemaRegistry

    registry = SchemaRegistry(settings.registry_url) if settings.registry_url else None
    with _connected(settings) as connection:
        yield ConsumerDeadLetters(connection, registry)


def _line(row: DeadLetterRow) -> str:
    return (
        f"{row.received_at:%Y-%m-%d %H:%M:%S}  {row.source}  {short(row.id)}  "
        f"{short(row.event_type or '(no event)')}  {short(row.key)}  "
        f"{row.topic} {row.partition} {row.offset}  {counted(row.attempts, 'attempt')}  "
        f"{f'replay {short(row.replay)}  ' if row.replay else ''}{row.error}"
    )


consumer.add_command(
    make_group(
        _inbox,
        Texts(
            group="Events that a consumer could not handle: list, show, replay, discard.",
            show="""Show one message of the inbox with its content, reason and audit, as JSON.

            If several consumers have a message with this id, each is printed.
            """,
            replay="""Replay dead letters: the consumer tries them again, with all attempts available.

            Later events of the aggregate are already handled, unless the consumer has on_dead_letter="block".
            """,
            discard="Discard dead letters: they are not handled. Their content is kept until pruned.",
            unknown="{} is not in any inbox",
        ),
        [
            click.option("--source", type=TEXT, help="Only this consumer."),
            click.option("--event-type", type=TEXT, help="Only this event type."),
            click.option("--aggregate-id", "key", type=TEXT, help="Only the aggregate with this id."),
        ],
        _line,
    )
)


@contextmanager
def _connected(settings: Settings, *, checks: bool = True) -> Iterator[Any]:
    import psycopg

    from outbox_pipelines.consumer import administration
    from outbox_pipelines.core.secret import first_line
    from outbox_pipelines.database import connect

    of_consumer = settings.of_consumer()
    with connect(of_consumer, name="outbox consumer", setting="OUTBOX_CONSUMER_DSN") as connection:
        try:
            if checks:
                administration.require_tables(connection)
            yield connection
        except psycopg.errors.UndefinedTable as error:
            raise SetupError(f"{first_line(error)}: run `outbox consumer migrate`") from None
