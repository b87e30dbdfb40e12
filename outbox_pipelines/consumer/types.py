"""Which types of events come, and which handlers never get one.

Invariants:
- A misspelled type is reported: otherwise its events are passed over, and their offsets committed.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

_LOG: Final = logging.getLogger(__name__)
# Warnings come with this many events that were passed over, ten times as many, and so on.
_FIRST_WARNING: Final = 100
_MOST_TYPES: Final = 1_000
_ALIKE: Final = 0.85
_SHOWN: Final = 5


class Types:
    """What has come to one consumer.

    Args:
        wanted: types with a handler of their own.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        self.passed_over: Counter[str] = Counter()
        """How many of each type have no handler; of the first 1,000 types."""
        self.unseen = set(wanted)
        """Types with a handler, of which no event has come."""
        self._total = 0
        self._warn_at = _FIRST_WARNING

    def handled(self, event_type: str) -> None:
        """An event with a handler has come."""
        if self.unseen:
            self.unseen.discard(event_type)

    def pass_over(self, event_type: str) -> None:
        """An event without a handler has come."""
        self._total += 1
        is_first = event_type not in self.passed_over
        if not is_first or len(self.passed_over) < _MOST_TYPES:
            self.passed_over[event_type] += 1
        if is_first and (alike := difflib.get_close_matches(event_type, self.unseen, 1, _ALIKE)):
            _LOG.warning(
                "events of type %r are skipped; the handler of %r has received no event yet: check the name",
                event_type,
                alike[0],
            )
        if self._total >= self._warn_at:
            self._warn_at *= 10
            self.warn()

    def warn(self) -> None:
        """Logs a warning where handlers have had no event while others were passed over."""
        if self.unseen and self._total:
            common = self.passed_over.most_common(_SHOWN)
            _LOG.warning(
                "no event of type %s was received, while %d events were skipped: %s. "
                "Check the names of the types",
                ", ".join(sorted(map(repr, self.unseen))),
                self._total,
                ", ".join(f"{name!r} {count}" for name, count in common),
            )
