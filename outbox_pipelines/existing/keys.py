"""The numbers by which the core knows the rows of a marked table, and the keys by which the table does.

Invariants:
- A row is claimed with a number that is greater than those of all rows before it in its claim and in earlier
  claims, so that numbers order the events of an aggregate as they are published.
- The number of a row in a table with an integer is that integer. Otherwise each claim gives its rows new
  numbers, which are negative, since they mean nothing outside of this process; those of published rows are
  forgotten.
- For one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from outbox_pipelines.core.event import Event

_FIRST: Final = -(2**62)


class Keys(Protocol):
    """Numbers and keys of one table's rows."""

    def numbered(self, events: list[Event]) -> list[Event]:
        """Return claimed events with their numbers as `seq`."""

    def number(self, key: str) -> int:
        """Return the number of a row that was not claimed yet."""

    def array(self, numbers: Iterable[int]) -> str:
        """Return the keys of rows, as PostgreSQL's text form of an array: quicker than to adapt thousands."""

    def forget(self, numbers: Iterable[int]) -> None:
        """These rows are published."""


class SeqKeys:
    """Of a table with an integer."""

    def numbered(self, events: list[Event]) -> list[Event]:
        return events

    def number(self, key: str) -> int:
        return int(key)

    def array(self, numbers: Iterable[int]) -> str:
        return array(numbers)

    def forget(self, numbers: Iterable[int]) -> None: ...


class IdKeys:
    """Of a table whose rows have only an id."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._last = _FIRST

    def numbered(self, events: list[Event]) -> list[Event]:
        return [event._replace(seq=self.number(event.id)) for event in events]

    def number(self, key: str) -> int:
        self._last += 1
        self._ids[self._last] = key
        return self._last

    def array(self, numbers: Iterable[int]) -> str:
        return "{" + ",".join(_quoted(self._ids[number]) for number in numbers) + "}"

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._ids.pop(number, None)


def array(numbers: Iterable[int]) -> str:
    """Return PostgreSQL's text form of an array of numbers."""
    return "{" + ",".join(map(str, numbers)) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
