"""Log lines that an outage repeats: each kind is logged once, then as a count each minute, until its end.

Invariants:
- A library does not configure logging, so the code that logs a line also limits it.
- An end is logged only if its line was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

_SECONDS: Final = 60.0
# A kind can come from outside, such as an error's text: the oldest ones are forgotten.
_MOST_KINDS: Final = 100


@dataclass(slots=True)
class _Line:
    began: float
    logged: float
    repeated: int = 0
    """Since it was logged last."""


class RepeatedLines:
    """The repeated lines of one logger; can be used by several threads.

    A kind is whatever stays the same while the text of a line differs: an error's code, a topic.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: dict[Hashable, _Line] = {}
        self._lock = threading.Lock()

    def __contains__(self, kind: Hashable) -> bool:
        """Return whether a line of this kind was logged and has not ended."""
        return kind in self._lines

    def log(
        self,
        kind: Hashable,
        message: str,
        *given: object,
        level: int = logging.WARNING,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Log a line unless one of its kind was logged within the last minute.

        Args:
            given: what the message has placeholders for.
            extra: fields of the line.
        """
        now = time.monotonic()
        with self._lock:
            line = self._lines.get(kind)
            if line is None:
                while len(self._lines) >= _MOST_KINDS:
                    self._lines.pop(next(iter(self._lines)))
                self._lines[kind] = _Line(now, now)
            elif now - line.logged < _SECONDS:
                line.repeated += 1
                return
            else:
                message += " (%d times in %.0f s)"
                given = (*given, line.repeated + 1, now - line.logged)
                line.logged, line.repeated = now, 0
        self._logger.log(level, message, *given, extra=extra)

    def end(self, kind: Hashable, message: str, *given: object) -> None:
        """Log that what the lines of a kind report has ended, if there were any, and after how long."""
        if kind not in self._lines:
            return
        with self._lock:
            line = self._lines.pop(kind, None)
        if line is not None:
            self._logger.warning(message + " after %.1f s", *given, time.monotonic() - line.began)
