"""The command `outbox`: what an operator types.

Exit codes: 0 success; 1 a check failed, or nothing matched; 2 usage or configuration, with a line that helps.
"""

from __future__ import annotations

import codecs
import io
import sys
from typing import Any, Final, NoReturn

import click

from outbox_pipelines import __version__
from outbox_pipelines.cli.adopt import adopt
from outbox_pipelines.cli.archive import archive
from outbox_pipelines.cli.bodies import bodies
from outbox_pipelines.cli.catalog import catalog
from outbox_pipelines.cli.cdc import cdc, cutover, debezium
from outbox_pipelines.cli.config import config, init, migrate
from outbox_pipelines.cli.consumer import consumer
from outbox_pipelines.cli.dead_letters import dead_letters, delayed
from outbox_pipelines.cli.keys import forget, generate, keys
from outbox_pipelines.cli.lint_writes import lint_writes
from outbox_pipelines.cli.local import local
from outbox_pipelines.cli.options import add_to
from outbox_pipelines.cli.partitions import partitions
from outbox_pipelines.cli.quality import alerts, quality, reconcile
from outbox_pipelines.cli.relay import relay
from outbox_pipelines.cli.replay import replay
from outbox_pipelines.cli.status import shards, status
from outbox_pipelines.cli.table import describe, table
from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.core.text import plain
from outbox_pipelines.errors import NotReadyError, SetupError

# In the order in which a person needs them; each with a line that is short enough for a terminal.
_COMMANDS: Final[dict[str, tuple[tuple[click.Command, str], ...]]] = {
    "First": (
        (init, "Write a first outbox.toml."),
        (config, "Check and show the settings."),
        (migrate, "Create or update the outbox's tables."),
        (relay, "Relay committed events to Kafka, until stopped."),
        (status, "Show backlog, lag, owners, and failed checks."),
    ),
    "Operate": (
        (dead_letters, "List, show, replay and discard dead letters."),
        (delayed, "List, cancel and move delayed events."),
        (alerts, "Send a test alert."),
        (shards, "Show the owner of each shard; change their number."),
        (partitions, "List, create, close and drop days."),
        (archive, "Archive, prove, restore and query days."),
        (replay, "Send published events again."),
        (bodies, "Check and sweep the bodies of large payloads."),
        (keys, "Manage the keys of data subjects."),
        (forget, "Destroy the key of a data subject."),
        (reconcile, "Compare a day with the topics and the consumers."),
        (quality, "Show what Great Expectations finds in the data."),
        (catalog, "Compare the event catalog with the table."),
        (consumer, "Manage idempotent consumers."),
    ),
    "Change how events are read": (
        (cdc, "Read events from PostgreSQL's log, by a slot."),
        (cutover, "Change where relays read, while writers run."),
        (table, "Describe, check and clean an existing outbox table."),
        (adopt, "Move an existing table to the append-only outbox."),
        (debezium, "Configure and watch Debezium in Kafka Connect."),
    ),
    "Develop": (
        (local, "Run PostgreSQL and Kafka on this machine."),
        (lint_writes, "Find writes that are not in one transaction."),
    ),
}


class _Cli(click.Group):
    """Turns the errors that a person has to act on into one line and an exit code."""

    def main(self, *given: Any, **named: Any) -> Any:
        # What a terminal cannot show is written as an escape, and ends no command.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
                stream.reconfigure(errors="backslashreplace")
        return super().main(*given, **named)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(str(each.name), text) for each, text in commands])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(context, args)
        # What `local run` gets is for another program.
        for each in rest if command is not local else ():
            try:
                each.encode()
            except UnicodeEncodeError:
                raise SetupError(f"{each} on the command line is not UTF-8 text: write it in UTF-8") from None
        return name, command, rest

    def invoke(self, context: click.Context) -> object:
        import psycopg

        from outbox_pipelines.database import refusal

        try:
            return super().invoke(context)
        except NotReadyError as error:
            _end(str(error), 1)
        except SetupError as error:
            _end(str(error), 2)
        except psycopg.Error as error:
            _end(f"the database refuses: {refusal(error)}", 2)


def limit_locks(command: click.Command, path: list[str]) -> None:
    """Limit how long the command at `path` below another one waits for locks."""
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    assert command.callback is not None
    command.callback = reading_only()(command.callback)


def _end(why: str, code: int) -> NoReturn:
    click.echo(plain(f"outbox: {why}"), err=True)
    sys.exit(code)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Relay a transactional outbox from PostgreSQL to Kafka.

    Settings come from the environment (OUTBOX_DSN, OUTBOX_KAFKA, …) or from outbox.toml, in the working
    directory or where OUTBOX_CONFIG says; it may list several outboxes. Exit codes: 0 success; 1 check
    failed or nothing matched; 2 usage or configuration error.
    """


for each in _COMMANDS.values():
    for command, _ in each:
        cli.add_command(command)

# These wait for a lock for some seconds, and then name the session that has it; also `migrate --check`.
READING: Final = (
    *("adopt plan", "archive changes", "archive history", "archive query", "archive report"),
    *("archive verify", "bodies check", "catalog check"),
    *(
        "catalog render",
        "cdc status",
        "consumer dead-letters list",
        "consumer dead-letters show",
        "consumer status",
    ),
    *("dead-letters list", "dead-letters show", "delayed list", "debezium config", "debezium status"),
    *("partitions list", "quality hour", "reconcile", "replay list", "shards", "status"),
    *("table check", "table describe"),
)
add_to(
    cli,
    # A linter in an application's CI has no settings of a relay.
    excluded=(lint_writes, local, config, init, generate),
    many=(status,),
    lists=(relay,),
    # If the output is redirected to that file, the shell has emptied it by now.
    without={describe: "table"},
)
for path in READING:
    limit_locks(cli, path.split())
