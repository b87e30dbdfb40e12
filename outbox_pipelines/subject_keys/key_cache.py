"""Keys in memory, each for some seconds.

Invariants:
- A key's time begins when the database was asked, not when it answered: a forgotten one is kept no longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class KeyCache(Generic[_Value]):
    """The newest values by name; can be used by several threads."""

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds, self._size = seconds, size
        self._values: dict[str, tuple[float, _Value]] = {}
        self._lock = threading.Lock()

    def known(self, names: Iterable[str]) -> tuple[dict[str, _Value], list[str]]:
        """Return values by name, and the names that have none."""
        since = time.monotonic() - self._seconds
        values: dict[str, _Value] = {}
        missing: list[str] = []
        for name in names:
            found = self._values.get(name)
            if found is None or found[0] <= since:
                missing.append(name)
            else:
                values[name] = found[1]
        return values, missing

    def put(self, name: str, value: _Value, asked: float) -> None:
        """Keep a value from the time on when the database was asked."""
        with self._lock:
            self._values.pop(name, None)
            self._values[name] = asked, value
            if len(self._values) > self._size:
                del self._values[next(iter(self._values))]
