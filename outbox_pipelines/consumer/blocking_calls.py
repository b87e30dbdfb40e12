"""How a consumer calls what blocks: at once, or in a thread beside the event loop.

Invariants:
- A call in a thread ends before its task goes on, also if the task is cancelled: what is called is used by
  one thread at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Blocking = Callable[..., Awaitable[Any]]
"""Calls a function with the arguments that follow it, and returns its result."""


async def at_once(do: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function in this thread: no event loop waits."""
    return do(*given, **named)


async def in_thread(do: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function in another thread, to its end."""
    running = asyncio.ensure_future(asyncio.to_thread(do, *given, **named))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
