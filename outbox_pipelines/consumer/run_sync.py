"""A coroutine that waits for nothing asynchronous, run to its end by a plain call.

The work of both consumers is written once, as coroutines; with blocking parts they never suspend.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def drive(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Its result, or its exception."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking part has waited for an event loop")
