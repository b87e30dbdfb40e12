"""Select the way to write through the caller's connection, cursor or session.

Invariants:
- A target's driver is already loaded: this module imports no driver that is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from outbox_pipelines.writer import statements
from outbox_pipelines.writer.context import SCHEMA
from outbox_pipelines.writer.errors import AutocommitError, OutboxError


class Way(NamedTuple):
    """Runs a query on the caller's connection and returns its rows; in a coroutine if asynchronous."""

    run: Callable[..., Any]
    asynchronous: bool = False


def no_transaction(instead: str) -> AutocommitError:
    """Return the error for a connection in autocommit mode; `instead` is the code to use."""
    return AutocommitError(
        "no transaction is open, and the connection is in autocommit mode: the event would be committed "
        f"separately from your business rows. Write both in one transaction: {instead}"
    )


INSTEAD: Final[list[Callable[[object], Way]]] = []
"""Replacements that tests have set for the selection; the last one is used."""


def way_through(target: object) -> Way:
    """Return the way to write through a target.

    Raises:
        OutboxError: the target's type is not supported.
    """
    if INSTEAD:
        return INSTEAD[-1](target)
    return way_of(type(target))


def way_of(kind: type) -> Way:
    """Return the way for targets of a type.

    Raises:
        OutboxError: the type is not supported.
    """
    way = _KNOWN.get(kind)
    if way is None:
        way = _KNOWN[kind] = _find(kind)
    return way if (schema := SCHEMA.get()) is None else _within(way, schema)


def _within(way: Way, schema: str) -> Way:
    return way._replace(run=lambda target, query: way.run(target, statements.within(query, schema)))


_KNOWN: Final[dict[type, Way]] = {}


def _find(kind: type) -> Way:
    ways: dict[type, Way] = {}
    if sys.modules.get("psycopg"):
        from outbox_pipelines.writer.targets import psycopg

        ways |= psycopg.WAYS
    if sys.modules.get("psycopg2"):
        from outbox_pipelines.writer.targets import psycopg2

        ways |= psycopg2.WAYS
    if sys.modules.get("sqlalchemy"):
        from outbox_pipelines.writer.targets import sqlalchemy

        ways |= sqlalchemy.ways()
    if sys.modules.get("asyncpg"):
        from outbox_pipelines.writer.targets import asyncpg

        ways |= asyncpg.WAYS
    if sys.modules.get("django.db"):
        from outbox_pipelines.writer.targets import django

        ways |= django.WAYS
    for base in kind.__mro__:
        if base in ways:
            return ways[base]
    raise OutboxError(
        f"cannot write through {kind.__module__}.{kind.__qualname__}: pass a connection or cursor of "
        "psycopg or psycopg2, a Session or Connection of SQLAlchemy, a connection of asyncpg, or Django's "
        "connection"
    )
