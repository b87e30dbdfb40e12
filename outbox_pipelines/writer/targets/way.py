"""How a driver runs a query, and the refusal that all drivers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outbox_pipelines.writer.errors import AutocommitError


class Way(NamedTuple):
    """Runs a query on the caller's connection and answers its rows; in a coroutine, where asynchronous."""

    run: Callable[..., Any]
    asynchronous: bool = False


def no_transaction(instead: str) -> AutocommitError:
    """The refusal of a connection on which the event would be committed alone; `instead`: what to write."""
    return AutocommitError(
        "no transaction is open, and the connection is in autocommit mode: the event would be committed "
        f"apart from your business rows. Write both in one transaction: {instead}"
    )
