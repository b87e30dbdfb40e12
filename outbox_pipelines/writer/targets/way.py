"""How a driver runs a query, and the autocommit error that all drivers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outbox_pipelines.writer.errors import AutocommitError


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
