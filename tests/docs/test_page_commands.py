"""The commands of the pages run, in a page's order and as printed.

Only servers, days, ids and files are the test's.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from outbox_pipelines.core.scripts import dropping
from outbox_pipelines.writer import emit, in_schema
from tests.conftest import Outbox, clean_environment, wait_until
from tests.docs.blocks import ROOT, Shell, blocks

ONLY_PARSED: Final = {
    "outbox catalog register": "needs a registry: tests/catalog/test_registration.py",
    "outbox relay --all": "needs several outboxes: tests/fleet",
    "outbox relay --start-at now": "is refused where events were relayed: tests/relay",
    "outbox archive register": "needs the catalog of an Iceberg table: tests/days/iceberg",
    "outbox shards set": "needs a running relay: tests/relay/test_resharding.py",
    "outbox partitions ensure --since": "runs before the page's other commands, which close the days",
    "outbox partitions attach": "needs an interrupted drop: tests/days/partitions",
    "ALTER TABLE cap.published": "needs the table of a library: tests/existing/libraries.py",
    "WITH taken AS": "needs the table of a library: tests/existing/libraries.py",
    "BEGIN;\nALTER TABLE events": "needs months: tests/existing/months/test_ahead.py",
    "git show": "needs a repository: tests/catalog/test_changes.py",
}
"""Lines of these pages that do not run here, by their beginning."""


@dataclass(frozen=True)
class World:
    """What a page takes for granted.

    Attributes:
        environment: beside the outbox's own.
        replaced: what stands for a printed text.
        names: of the page's Python.
        languages: the blocks that run here, beside commands.
        exit_codes: as a `Shell` has them.
    """

    environment: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    languages: tuple[str, ...] = ()
    exit_codes: dict[str, int] = field(default_factory=dict)


Make = Callable[[Outbox], World]
WORLDS: Final[dict[str, Make]] = {}
_PAYLOAD: Final = json.dumps(
    {
        "total": 5,
        "customer": {"id": 42, "email": "ann@example.com"},
        "buyer": {"name": "Ann"},
        "lines": [{"name": "a"}],
    }
)
_TABLE: Final = """
CREATE SCHEMA app;
CREATE TABLE {} (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), seq bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    aggregate_type text NOT NULL, aggregate_id text NOT NULL, event_type text NOT NULL,
    payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz);
INSERT INTO {} (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', '1', 'order.placed', '{{}}')"""
_CONSUMER: Final = """
from outbox_pipelines.consumer import Consumer, RefusedError

consumer = Consumer(source="billing", topics=[{!r}], kafka={!r}, dsn={!r})
@consumer.on("order.placed")
def placed(event, connection):
    raise RefusedError("no")
"""


def _world(*pages: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        WORLDS.update({f"docs/{page}" if page[0].islower() else page: make for page in pages})
        return make

    return add


@_world("README.md", "relay.md", "polling-or-cdc.md", "dagster.md")
def _outbox(outbox: Outbox) -> World:
    return World()


def _past(outbox: Outbox) -> date:
    """A day with an event that is published, written as docs/days.md says."""
    day = datetime.now(UTC).date() - timedelta(3)
    shell = Shell(clean_environment() | outbox.environment)
    shell.run(f"outbox partitions ensure --since {day}")
    [backfill] = [block.text for block in blocks("docs/days.md") if block.language == "sql"]
    with outbox.connect() as connection:
        connection.execute(backfill.replace("2026-11-20", str(day)).replace("'{}'", f"'{_PAYLOAD}'").encode())
    shell.run("outbox relay --until-empty")
    return day


@_world("days.md")
def _days(outbox: Outbox) -> World:
    day = str(_past(outbox))
    Path("bodies").mkdir()
    given = {"OUTBOX_ARCHIVE": "archive", "OUTBOX_BODIES": "bodies", "OUTBOX_RETENTION_DAYS": "1"}
    return World(given, {"2026-11-20": day})


def _archived(outbox: Outbox) -> tuple[dict[str, str], str]:
    """The settings, and a day that is archived."""
    day = str(_past(outbox))
    given = {"OUTBOX_ARCHIVE": "archive"}
    shell = Shell(clean_environment() | outbox.environment | given)
    shell.run("outbox partitions close")
    shell.run(f"outbox archive day {day}")
    return given, day


@_world("retention.md")
def _dropped(outbox: Outbox) -> World:
    given, day = _archived(outbox)
    Shell(clean_environment() | outbox.environment | given).run(f"outbox partitions drop {day}")
    # The event has no header.
    return World(given, {"2026-11-21": day, "--header user ": ""})


@_world("queries.md", "reconciliation.md")
def _archive(outbox: Outbox) -> World:
    given, day = _archived(outbox)
    Path("catalog.yaml").write_text(
        "events: {order.placed: {description: d, producer: p, owner: o, schema: {type: object, properties: "
        "{total: {type: integer}, buyer: {type: object, properties: {name: {type: string}}}, "
        "lines: {type: array}}}}}"
    )
    given["OUTBOX_CATALOG_FILE"] = "catalog.yaml"
    days = dict.fromkeys(("2026-11-20", "2026-11-01"), day)
    return World(given, {**days, "aircraft N725MQ": "order 42"})


def _bare(outbox: Outbox, *statements: str) -> None:
    """A database with these and no outbox."""
    with outbox.connect() as connection:
        for statement in (dropping(even_if_unpublished=True), *statements):
            connection.execute(statement.encode())


@_world("existing-tables.md")
def _existing(outbox: Outbox) -> World:
    _bare(
        outbox,
        _TABLE.format("outbox", "outbox"),
        "ALTER TABLE outbox ADD status text NOT NULL DEFAULT 'PENDING'",
    )
    return World({"OUTBOX_ARCHIVE": "archive"}, languages=("sql",))


@_world("adopt.md")
def _adopted(outbox: Outbox) -> World:
    _bare(outbox, _TABLE.format("app.outbox", "app.outbox"))
    shell = Shell(clean_environment() | outbox.environment)
    shell.run("outbox table describe app.outbox > adopt.toml")
    return World({"OUTBOX_ARCHIVE": "archive"})


@_world("from-debezium.md")
def _debezium(outbox: Outbox) -> World:
    columns = (
        "id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text NOT NULL, type text NOT NULL"
    )
    _bare(outbox, f"CREATE TABLE outbox ({columns}, payload jsonb NOT NULL)")
    # It is to be completed, as the page shows.
    return World(exit_codes={"outbox table describe": 2})


@_world("catalog.md")
def _catalog(outbox: Outbox) -> World:
    [example] = [block.text for block in blocks("docs/catalog.md") if block.language == "yaml"]
    Path("catalog.yaml").write_text(example)
    return World()


@_world("lint-writes.md")
def _linted(outbox: Outbox) -> World:
    [example] = [block.text for block in blocks("docs/lint-writes.md") if block.text.startswith("# good")]
    entry = "{description: d, producer: p, owner: o}"
    Path("catalog.yaml").write_text(f"events: {{clock.ticked: {entry}}}")
    Path("src").mkdir()
    Path("src/clock.py").write_text(example)
    return World()


@_world("erasure.md")
def _erased(outbox: Outbox) -> World:
    names = {"emit": emit, "connection": outbox.connect(autocommit=False)}
    return World({"OUTBOX_KEYS_DSN": outbox.environment["OUTBOX_DSN"]}, names=names, languages=("python",))


@_world("consuming.md")
def _consuming(outbox: Outbox) -> World:
    return World({"OUTBOX_CONSUMER_DSN": outbox.environment["OUTBOX_DSN"], "DSN": ""})


@_world("consuming-failures.md")
def _failures(outbox: Outbox) -> World:
    """Two dead letters."""
    given = {"OUTBOX_CONSUMER_DSN": outbox.environment["OUTBOX_DSN"]}
    outbox.write("a", "b")
    shell = Shell(clean_environment() | outbox.environment | given)
    shell.run("outbox relay --until-empty")
    shell.run("outbox consumer migrate")
    Path("billing").mkdir()
    # The group of a consumer has the name of its source, and others use this Kafka.
    kafka = {"bootstrap.servers": outbox.settings.kafka, "group.id": outbox.topic()}
    Path("billing/events.py").write_text(
        _CONSUMER.format(outbox.topic(), kafka, outbox.settings.dsn.reveal())
    )
    stop = threading.Event()
    thread = threading.Thread(target=import_module("billing.events").consumer.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: len(_dead(outbox)) == 2, what="dead letters")
    finally:
        stop.set()
        thread.join(600)
    one, other = _dead(outbox)
    at = {
        "show ID": f"show {one}",
        "replay ID…": f"replay {one} --yes",
        "discard ID…": f"discard {other} --yes",
    }
    return World(given, {**at, **dict.fromkeys(("--event-type …", "--aggregate-id …", "--error …"), "")})


def _dead(outbox: Outbox) -> list[str]:
    found = outbox.rows("SELECT message_id FROM inbox WHERE state = 'failed' ORDER BY seq")
    return [str(message_id) for (message_id,) in found]


@_world("outboxes.md")
def _outboxes(outbox: Outbox) -> World:
    first = next(block.text for block in blocks("docs/outboxes.md") if block.language == "toml")
    Path("secret").write_text(outbox.settings.dsn)
    first = first.replace("/run/secrets/billing", str(Path("secret").resolve()))
    Path("outbox.toml").write_text(first.replace("broker:9092", outbox.settings.kafka))
    given = {"ORDERS_DSN": outbox.environment["OUTBOX_DSN"]}
    names = {"emit": emit, "in_schema": in_schema, "connection": outbox.connect(autocommit=False)}
    Shell(clean_environment() | given).run("outbox migrate --outbox billing")
    return World(given, names=names, languages=("python",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder, of which modules are imported."""
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.chdir(tmp_path):
        yield
    for name in ("billing", "billing.events"):
        sys.modules.pop(name, None)


def test_what_does_not_run_is_printed() -> None:
    """Guards against an exception for a line that is gone, and for a test that was moved."""
    printed = [text for page in WORLDS for block in blocks(page) for text in [block.text, *block.lines]]
    for begins, reason in ONLY_PARSED.items():
        assert any(text.startswith(begins) for text in printed), begins
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/.]+", reason)), reason


@pytest.mark.extended
@pytest.mark.parametrize("page", WORLDS)
@pytest.mark.usefixtures("folder")
def test_its_commands_run(page: str, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a page whose third command fails."""
    world = WORLDS[page](outbox)
    shell = Shell(clean_environment() | outbox.environment | world.environment, world.exit_codes)
    changed = "|".join(map(re.escape, world.replaced)) or "$^"
    for block in blocks(page):
        is_run = not block.language or block.language in world.languages
        for printed in ([block.text] if block.language else block.lines) if is_run else ():
            text = re.sub(changed, lambda found: world.replaced[found[0]], printed)
            if text.startswith(tuple(ONLY_PARSED)):
                continue
            if block.language == "python":
                for name, value in shell.environment.items():
                    monkeypatch.setenv(name, value)
                exec(compile(text, page, "exec", dont_inherit=True), world.names)
            elif block.language == "sql":
                with outbox.connect() as connection:
                    for statement in re.findall(r"[^;]+;", re.sub("--.*", "", text)):
                        connection.execute(statement.encode())
            else:
                shell.run(text)
