"""An existing table beside an append-only outbox in one database: its settings do not change the other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli
from tests.conftest import Outbox

DAY = f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}"
# Commands about days, shards, slots or the schema; the arguments are right, so nothing else is refused.
REFUSED = (
    *("shards", "shards set 2", "partitions list", "partitions ensure"),
    *(f"partitions close {DAY}", f"partitions reopen {DAY} --yes", f"partitions attach {DAY}"),
    *("partitions purge", f"partitions drop {DAY}", "partitions drop --due", f"archive day {DAY}"),
    *(f"archive verify {DAY}", f"archive restore {DAY}", "archive adopt", "archive history order 1"),
    *("archive register", "archive changes", "archive expire"),
    f"archive redact {DAY} --where true --path a --reason r",
    *(f"reconcile {DAY}", "quality hour", "catalog check", "cdc setup", "cdc drop", "cdc status"),
    *("cutover --to cdc", "bodies adopt", "bodies check", "bodies sweep", "delayed list", "delayed move"),
    "delayed cancel 01a21924-ba13-760e-85c0-7786a622b10b --reason r",
    *("replay list", "replay cancel 01a21924-ba13-760e-85c0-7786a622b10b"),
)
# What is about any outbox, about none, or about the existing table itself; `adopt` has the schema migrated.
OTHERS = {
    "migrate",
    *("init", "config", "relay", "status", "dead-letters", "alerts", "consumer", "table", "adopt", "local"),
    *("forget", "keys"),
    *(
        "debezium",
        "lint-writes",
        "archive query",
        "archive report",
        "quality day",
        "catalog render",
        "catalog diff",
    ),
    *("catalog classes", "catalog register", "catalog schemas"),
}
STATE = """
SELECT (SELECT array_agg(d ORDER BY d.day)::text FROM outbox_days d),
       (SELECT count(*) FROM outbox_shards), (SELECT count(*) FROM pg_class)"""


def _leaves(command: click.Command, path: str = "") -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from _leaves(each, f"{path} {name}".strip())
    else:
        yield path


def test_every_command_is_classified() -> None:
    """Guards against a new command that takes the settings of an existing table for those of an outbox."""
    leaves = [*_leaves(cli)]
    refused = {each for each in leaves if any(f"{one} ".startswith(f"{each} ") for one in REFUSED)}
    assert [each for each in leaves if not {each, each.partition(" ")[0]} & (OTHERS | refused)] == []


def test_the_other_outbox_stays_as_it_is(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against days that are dropped, or shards that are changed, by the settings of another outbox."""
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text("events: {a: {description: b, producer: c, owner: d}}")
    environment = {
        "OUTBOX_DSN": outbox.settings.require_dsn(),
        "OUTBOX_KAFKA": outbox.settings.kafka,
        "OUTBOX_TABLE": '{"name": "app.outbox", "columns": {"published_at": "published_at"}}',
        "OUTBOX_ARCHIVE": str(tmp_path / "archive"),
        "OUTBOX_BODIES": str(tmp_path),
        "OUTBOX_CATALOG_FILE": str(catalog),
    }
    with outbox.connect() as connection:
        before = connection.execute(STATE).fetchone()
        for command in REFUSED:
            done = CliRunner().invoke(cli, command.split(), env=environment)
            assert done.exit_code == 2, (command, done.output)
            assert "OUTBOX_TABLE names the existing table app.outbox" in done.output, (command, done.output)
        assert connection.execute(STATE).fetchone() == before
