"""docs/writing-events.md taken apart, and what its examples are given.

Invariants:
- An example sees the shared lines, and what earlier examples have imported or defined; nothing they did.
- Its outcomes are the comments `# → …`, in their order.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import django.conf
import psycopg
from django.db import connections, models
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

from outbox_pipelines.writer import validate_with
from tests.schema.servers import Database
from tests.writer import targets

PATH = Path(__file__).parents[2] / "docs" / "writing-events.md"
TEXT = PATH.read_text()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OUTCOME = re.compile(r"# → (.*)$", re.MULTILINE)
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


class Block(NamedTuple):
    """A code block and the line that it begins at."""

    line: int
    source: str

    @property
    def outcomes(self) -> list[str]:
        return _OUTCOME.findall(self.source)

    @property
    def tree(self) -> ast.Module:
        return ast.increment_lineno(ast.parse(self.source), self.line - 1)


def blocks(language: str) -> list[Block]:
    return [
        Block(TEXT.count("\n", 0, found.start(2)) + 1, found[2])
        for found in _BLOCK.finditer(TEXT)
        if found[1] == language
    ]


SHARED, *EXAMPLES = blocks("python")
[SQL] = blocks("sql")


def run(example: Block, names: dict[str, Any]) -> None:
    """Runs an example after the shared lines, with these names."""
    earlier = EXAMPLES[: EXAMPLES.index(example)]
    body = [
        *SHARED.tree.body,
        *(node for block in earlier for node in block.tree.body if isinstance(node, _DEFINITIONS)),
        *example.tree.body,
    ]
    exec(compile(ast.Module(body, []), PATH, "exec"), names)


@contextmanager
def given(database: Database, example: Block) -> Iterator[dict[str, Any]]:
    """The names that examples take for granted, and their tables."""
    database.rows("CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL, total int NOT NULL)")
    database.rows("INSERT INTO orders VALUES (42, 'new', 5)")
    database.rows("CREATE TABLE documents (id int GENERATED ALWAYS AS IDENTITY, body text)")
    at = psycopg.conninfo.conninfo_to_dict(database.dsn)
    names: dict[str, Any] = {
        "dsn": f"postgresql://{at['user']}@{at['host']}:{at['port']}/{at['dbname']}"
        f"?passfile={at['passfile']}",
        "sessions": orm.sessionmaker(targets.engine(database)),
        "async_sessions": sqlalchemy_asyncio.async_sessionmaker(targets.async_engine("asyncpg", database)),
        "Order": Order,
    }
    with ExitStack() as stack:
        stack.enter_context(contextlib.chdir(Path(__file__).parent))
        stack.callback(validate_with, None)
        if "django" in example.source:
            connections["default"] = connections[stack.enter_context(targets.django_wrapper(database))]
            stack.callback(connections.__delitem__, "default")
            names["Order"] = _django_order()
        yield names


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str]
    total: orm.Mapped[int]


@functools.cache
def _django_order() -> type[models.Model]:
    assert django.conf.settings.configured

    class Order(models.Model):  # type: ignore[misc]
        state = models.TextField()

        class Meta:
            app_label = "guide"
            db_table = "orders"

    return Order
