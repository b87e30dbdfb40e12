"""Load consumers by name, for the commands and for Dagster.

Invariants:
- A name is `module:attribute`, as `billing.events:consumer`; modules of the working directory are found.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from typing import Literal

from outbox_pipelines.consumer.asynchronous import AsyncConsumer
from outbox_pipelines.consumer.config import Counts
from outbox_pipelines.consumer.consumer import Consumer
from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.errors import SetupError

AnyConsumer = Consumer | AsyncConsumer


def load(name: str) -> AnyConsumer:
    """Return the consumer of that name.

    Raises:
        SetupError: the consumer does not exist.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SetupError(
            f"{name!r} is not a consumer: write module:name, for example billing.events:consumer"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise SetupError(f"{name}: cannot find the module {error.name} from {here}") from None
    except AttributeError:
        raise SetupError(f"{name}: {module} has no {attribute}") from None
    if not isinstance(found, AnyConsumer):
        raise SetupError(f"{name} is a {type(found).__name__}: give a Consumer or AsyncConsumer")
    return found


def run(consumer: AnyConsumer, how: Literal["run", "receive"]) -> Counts:
    """Run a consumer until SIGTERM or SIGINT."""
    if isinstance(consumer, AsyncConsumer):
        return asyncio.run(consumer.run() if how == "run" else consumer.receive())
    return consumer.run() if how == "run" else consumer.receive()


def drain(consumer: AnyConsumer, *, until_empty: bool, seconds: float | None = None) -> Counts:
    """Drain until SIGTERM or SIGINT, until nothing is due if requested, or for this many seconds."""
    if isinstance(consumer, AsyncConsumer):
        return asyncio.run(_drain(consumer, until_empty, seconds))
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set) if seconds is not None else None
    if timer is not None:
        timer.start()
    try:
        return consumer.drain(stop, until_empty=until_empty)
    finally:
        if timer is not None:
            timer.cancel()


def backlog(consumer: AnyConsumer) -> tuple[Backlog, bool]:
    """Return the backlog of a consumer's inbox, and whether an event in it is due."""
    if isinstance(consumer, AsyncConsumer):
        return asyncio.run(consumer.backlog())
    return consumer.backlog()


async def _drain(consumer: AsyncConsumer, until_empty: bool, seconds: float | None) -> Counts:
    stop = asyncio.Event()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    return await consumer.drain(stop, until_empty=until_empty)
