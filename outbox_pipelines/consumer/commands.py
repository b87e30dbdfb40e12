"""The commands `outbox consumer …`: the tables beside a consumer's own."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from outbox_pipelines import log
from outbox_pipelines.dead_letter_options import Command, Option, Time, act, actions, actor, wrapped
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain, to_json

if TYPE_CHECKING:
    from outbox_pipelines.consumer.inbox import Backlog
    from outbox_pipelines.consumer.loading import AnyConsumer


@click.group()
def consumer() -> None:
    """Manage idempotent consumers, in the database of OUTBOX_CONSUMER_DSN, schema OUTBOX_CONSUMER_SCHEMA."""


@consumer.command("migrate")
@click.pass_obj
def make_tables(settings: Settings) -> None:
    """Create what is missing of the consumer's tables; again: changes nothing."""
    from outbox_pipelines.consumer import tables

    with _connected(settings) as connection:
        tables.migrate(connection)
    click.echo("the consumer's tables are there")


@consumer.command("prune")
@click.option(
    "--days",
    type=click.IntRange(1, 50),
    required=True,
    help="Keep what was handled in the last so many days: more than Kafka's topics keep.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def prune_rows(settings: Settings, days: int, as_json: bool) -> None:
    """Forget events that were handled long ago, a day at a time. Run it every day.

    An event that is forgotten and comes again is handled again.
    """
    from outbox_pipelines.consumer import tables

    with _connected(settings) as connection:
        pruned = tables.prune(connection, timedelta(days=days))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(pruned)))
        return
    busy = f"; {len(pruned.busy)} in use were left for the next time" if pruned.busy else ""
    click.echo(
        f"{len(pruned.emptied)} days emptied, {pruned.deleted:,} rows without a day and "
        f"{pruned.received:,} of the inbox deleted{busy}"
    )


@consumer.command()
@click.argument("name", metavar="[MODULE:NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(settings: Settings, name: str | None, as_json: bool) -> None:
    """Show how far the inboxes are behind, and how many dead letters they have.

    With MODULE:NAME the inbox of this consumer in its own database, how far it is behind in Kafka, and which
    types the newest messages have. A warning names types with a handler of which there is none.
    """
    from outbox_pipelines.consumer.dead_letters import backlogs

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
        click.echo("nothing waits in an inbox, and there are no dead letters")


def _show_one(name: str, as_json: bool) -> None:
    from outbox_pipelines.consumer import loading
    from outbox_pipelines.consumer.inspection import inspect

    consumer = loading.load(name)
    backlog, _ = loading.backlog(consumer)
    found = inspect(consumer)
    if as_json:
        one = {"inboxes": [dataclasses.asdict(backlog)], "kafka": dataclasses.asdict(found)}
        click.echo(json.dumps(one))
        return
    _show_inbox(backlog)
    for topic, behind in found.behind.items():
        click.echo(plain(f"{topic}: {behind:,} messages behind"))
    if not found.behind:
        click.echo("warning: there is no such topic")
    click.echo(f"types of the newest {found.sampled:,} messages:")
    for event_type, count in found.types.items():
        passed_over = ", no handler" if event_type in found.passed_over else ""
        click.echo(plain(f"{count:>8,} × {event_type or '(no event)'}{passed_over}"))
    for event_type, alike in found.unmatched.items():
        advice = f"; {alike!r} has no handler: check the name" if alike else ""
        click.echo(plain(f"warning: none is of type {event_type!r}, which has a handler{advice}"))


def _show_inbox(backlog: Backlog) -> None:
    age = "" if backlog.oldest_seconds is None else f", the oldest for {backlog.oldest_seconds:,.0f} s"
    click.echo(
        plain(f"{backlog.source}: {backlog.waiting:,} waiting{age}; {backlog.dead_letters:,} dead letters")
    )


def _at_work(command: Command) -> Command:
    """The consumer, and where its metrics are served."""
    command = click.option(
        "--metrics-address",
        envvar="OUTBOX_METRICS_ADDRESS",
        default="127.0.0.1",
        show_default=True,
        help="Address of that port; anyone who reaches it may read.",
    )(command)
    command = click.option(
        "--metrics-port",
        envvar="OUTBOX_METRICS_PORT",
        type=click.IntRange(0, 65535),
        help="Serve Prometheus metrics here (with prometheus-client); 0: any free port.",
    )(command)
    return click.argument("name", metavar="MODULE:NAME")(command)


@contextmanager
def _measured(name: str, metrics_port: int | None, metrics_address: str) -> Iterator[AnyConsumer]:
    """The consumer of that name, with its metrics served if a port is named."""
    from outbox_pipelines.consumer import loading

    found = loading.load(name)
    if metrics_port is None:
        yield found
        return
    try:
        from outbox_pipelines.consumer import prometheus
    except ModuleNotFoundError as error:
        raise SetupError(f"--metrics-port needs {error.name}: pip install prometheus-client") from None
    with prometheus.serving(found, metrics_port, metrics_address) as url:
        log.say(f"metrics at {url}", url=url)
        yield found


@consumer.command()
@_at_work
def run(**given: Any) -> None:
    """Run a consumer until SIGTERM or SIGINT; it brings its own database and Kafka."""
    from outbox_pipelines.consumer import loading

    with _measured(**given) as found:
        click.echo(loading.run(found, "run"))


@consumer.command()
@_at_work
def receive(**given: Any) -> None:
    """Put a consumer's events into its inbox, until SIGTERM or SIGINT."""
    from outbox_pipelines.consumer import loading

    with _measured(**given) as found:
        click.echo(loading.run(found, "receive"))


@consumer.command()
@_at_work
@click.option("--until-empty", is_flag=True, help="End when nothing is due.")
def drain(until_empty: bool, **given: Any) -> None:
    """Handle what is in a consumer's inbox, until SIGTERM or SIGINT; any number can do so side by side."""
    from outbox_pipelines.consumer import loading

    with _measured(**given) as found:
        click.echo(loading.drain(found, until_empty=until_empty))


@consumer.group("dead-letters")
def dead_letters() -> None:
    """Events that a consumer could not handle: list, show, replay, discard."""


def _filters(command: Command) -> Command:
    """The options that say which dead letters are meant."""
    options: list[Option] = [
        click.option("--source", help="Of this consumer."),
        click.option("--event-type", help="Of this event type."),
        click.option("--aggregate-id", "key", help="Of the aggregate with this id."),
        click.option("--error", metavar="TEXT", help="Whose reason contains this."),
        click.option(
            "--since", type=Time(), help="Received since then: 2026-11-21T14:00 (UTC), 30m, 2h, 7d."
        ),
        click.option("--until", type=Time(), help="Received until then."),
    ]
    return wrapped(command, options)


@dead_letters.command("list")
@_filters
@click.option("--discarded", is_flag=True, help="Those that were discarded, instead.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="Rows at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def list_(settings: Settings, /, discarded: bool, limit: int, as_json: bool, **given: Any) -> None:
    """List dead letters, the newest first, with their number by reason."""
    from outbox_pipelines.consumer.dead_letters import Filter, find

    with _connected(settings) as connection:
        found = find(connection, Filter(**given), limit=limit, discarded=discarded)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2, default=_text))
        return
    if not found.total:
        click.echo("none")
        return
    for row in found.rows:
        click.echo(
            plain(
                f"{row.received_at:%Y-%m-%d %H:%M:%S}  {row.source}  {row.id}  "
                f"{row.event_type or '(no event)'}  {row.key}  "
                f"{row.topic} {row.partition} {row.offset}  {row.attempts} attempts  {row.error}"
            )
        )
    if found.total > len(found.rows):
        click.echo(f"… and {found.total - len(found.rows):,} more (--limit)")
    click.echo()
    for error, count in found.by_error.items():
        click.echo(plain(f"{count:>8,} × {error}"))


@dead_letters.command()
@click.argument("message_id", metavar="ID", type=click.UUID)
@click.pass_obj
def show(settings: Settings, message_id: UUID) -> None:
    """Show everything of one message of the inbox, as JSON: content, reason, what was done to it."""
    from outbox_pipelines.consumer import dead_letters

    with _connected(settings) as connection:
        found = dead_letters.show(connection, message_id)
    if not found:
        click.echo(f"outbox: {message_id} is in no inbox", err=True)
        sys.exit(1)
    click.echo(to_json(found if len(found) > 1 else found[0], indent=2))


@dead_letters.command()
@lambda command: actions(command, _filters)
def replay(settings: Settings, /, **given: Any) -> None:
    """Let the consumer try dead letters again, with all their attempts.

    Later events of the aggregate were handled already, unless it has on_dead_letter="block".
    """
    _act(settings, "replay", **given)


@dead_letters.command()
@lambda command: actions(command, _filters)
def discard(settings: Settings, /, **given: Any) -> None:
    """Give dead letters up: they are not handled. Their content is kept until it is pruned."""
    _act(settings, "discard", **given)


def _act(settings: Settings, action: Any, *, ids: tuple[UUID, ...], reason: str, **given: Any) -> None:
    from outbox_pipelines.consumer import dead_letters

    how = {name: given.pop(name) for name in ("everything", "dry_run", "yes", "as_json")}
    which = dead_letters.Filter(ids=ids, **given)
    with _connected(settings) as connection:
        act(
            action,
            lambda: dead_letters.find(connection, which, limit=1).total,
            lambda: dead_letters.act(connection, action, which, actor=actor(), reason=reason),
            is_everything=which.is_empty,
            reason=reason,
            **how,
        )


@contextmanager
def _connected(settings: Settings) -> Iterator[Any]:
    import psycopg

    from outbox_pipelines.database import connect
    from outbox_pipelines.secret import first_line

    of_consumer = settings.of_consumer()
    with connect(of_consumer, name="outbox consumer", setting="OUTBOX_CONSUMER_DSN") as connection:
        try:
            yield connection
        except psycopg.errors.UndefinedTable as error:
            raise SetupError(f"{first_line(error)}: outbox consumer migrate makes it") from None


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
