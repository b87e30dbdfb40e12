"""A guide's table that is to be adopted, in a database of its own."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.existing.adopt import steps
from outbox_pipelines.local import Stack
from outbox_pipelines.relay import service
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.settings import Settings
from tests.conftest import Message, fresh_database, read_topic, topic_prefix
from tests.existing import textbook
from tests.existing.guides import Guide
from tests.existing.textbook import Table

SCHEMA = "box"
ACCEPTED = {
    "C": ["ids", "column:version"],
    "E": ["column:trace_id"],
}


@dataclass(frozen=True)
class Adopted:
    """A guide's table."""

    guide: Guide
    table: Table

    @property
    def settings(self) -> Settings:
        return self.table.settings

    @property
    def name(self) -> str:
        return "outbox_events" if self.guide.name == "C" else "outbox"

    def connect(self) -> psycopg.Connection[Any]:
        return self.table.connect()

    def connect_to_write(self) -> psycopg.Connection[Any]:
        """For a library that has transactions of its own."""
        return self.table.connect(autocommit=False)

    def write(self, *events: tuple[str, int]) -> list[str]:
        """Events of (aggregate, number), each in a transaction of its own; the ids."""
        with self.connect() as connection:
            write = self.guide.writers[0]
            return [write(connection, key, "order.created", {"n": n}) for key, n in events]

    def run(self, *words: str, **environment: str) -> str:
        """A command that succeeds; what it printed."""
        done = self.table.outbox.outbox(*words, **self.environment | environment)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def refuse(self, *words: str, **environment: str) -> tuple[int, str]:
        """A command that fails with one line."""
        done = self.table.outbox.outbox(*words, **self.environment | environment)
        assert done.returncode in (1, 2), (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.splitlines()[-1]

    @property
    def environment(self) -> dict[str, str]:
        return self.table.environment | {
            "OUTBOX_SCHEMA": self.settings.db_schema,
            "OUTBOX_VALUE_FORMAT": self.settings.value_format,
        }

    @property
    def accepted(self) -> list[str]:
        return ACCEPTED.get(self.guide.name, [])

    def switch(self) -> steps.Switched:
        return steps.switch(self.settings, self.accepted, seconds=30, say=print)

    def drain(self) -> int:
        return steps.drain(self.settings, seconds=60, say=print)

    def back(self) -> steps.Switched:
        return steps.back(self.settings, seconds=60, say=print)

    def state(self) -> str:
        with self.connect() as connection:
            ((state,),) = connection.execute(f"SELECT state FROM {SCHEMA}.outbox_adopted").fetchall()
        return str(state)

    def relay(self, *, table: bool = False, **settings: object) -> Totals:
        """The relay of the outbox, or of the table, until it is empty."""
        given = self.settings.model_copy(update=({} if table else {"table": {}}) | settings)
        return service.relay(given, until_empty=True)

    def messages(self) -> list[Message]:
        kind = "order" if self.guide.name == "C" else "Order"
        return read_topic(self.settings.kafka, self.table.outbox.topic(kind))

    def numbers(self) -> dict[str, list[int]]:
        """By aggregate, the numbers in the order of the topic."""
        found = defaultdict(list)
        for message in self.messages():
            value = json.loads(message.value or "")
            found[message.key].append(value.get("payload", value)["n"])
        return dict(found)


Make = Callable[..., Adopted]


@pytest.fixture
def make(stack: Stack, tmp_path: Path) -> Iterator[Make]:
    """Makes a guide's table, which names its schema."""
    with fresh_database(stack.dsn) as dsn:
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"

        def made(
            guide: Guide, *, more: str = "", ddl: Callable[[str], str] = str, **settings: Any
        ) -> Adopted:
            mapping = guide.mapping.replace('name = "', 'name = "public.', 1).replace(
                "[columns]", f"[columns]\n{more}", 1
            )
            table = textbook.make(dsn, stack.kafka, topic, ddl(guide.ddl), mapping)
            return Adopted(guide, table.with_(db_schema=SCHEMA, **guide.settings, **settings))

        yield made
