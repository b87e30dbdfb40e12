"""Which events a replay sends, as an operator says it.

Invariants:
- A selection without any condition, and one that no event can meet, is refused: it is a mistake.
- A condition in SQL is one expression: see `days.archive.question`.
- It selects the same events whenever it is evaluated: a resume asks again.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from uuid import UUID

from outbox_pipelines.days.archive import question
from outbox_pipelines.days.archive.rendering import literal
from outbox_pipelines.errors import SetupError

_DAY = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that an event has to meet together; an empty one is met by all."""

    since: str = ""
    """A UTC day or a time; this day or time is included."""
    until: str = ""
    """A UTC day, which is included, or a time, which is not."""
    topics: tuple[str, ...] = ()
    """Those to which the events were published."""
    aggregate_types: tuple[str, ...] = ()
    aggregate_ids: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    where: str = ""
    """A condition in DuckDB's SQL on the columns of the archive."""

    def __post_init__(self) -> None:
        if not any(asdict(self).values()):
            raise SetupError(
                "no events are selected: give --since, --until, --topic, --aggregate-type, --aggregate-id, "
                "--event-type, --id or --where"
            )
        if self.start >= self.end:
            raise SetupError(f"--since {self.since} is not before --until {self.until}: exchange them")
        for each in self.ids:
            try:
                UUID(each)
            except ValueError:
                raise SetupError(f"--id {each} is not a UUID: copy the id of an event") from None
        if self.where:
            question.require_condition(self.where)

    @property
    def start(self) -> datetime:
        """The first time, UTC."""
        return _time("--since", self.since) if self.since else datetime.min.replace(tzinfo=UTC)

    @property
    def end(self) -> datetime:
        """The time before which all events were written, UTC."""
        if not self.until:
            return datetime.max.replace(tzinfo=UTC)
        return _time("--until", self.until) + timedelta(1 if _DAY.fullmatch(self.until) else 0)

    def has(self, day: date) -> bool:
        """Return whether a UTC day can have selected events."""
        return self.start.date() <= day and datetime.combine(day, time(0), UTC) < self.end

    @property
    def condition(self) -> str:
        """The same in DuckDB's SQL, without topics."""
        listed = (
            ("aggregate_type", self.aggregate_types),
            ("aggregate_id", self.aggregate_ids),
            ("event_type", self.event_types),
            ("id", tuple(str(UUID(each)) for each in self.ids)),
        )
        parts = [f"{name} IN ({', '.join(map(literal, given))})" for name, given in listed if given]
        if self.since:
            parts.append(f"created_at >= {literal(self.start.isoformat())}::TIMESTAMPTZ")
        if self.until:
            parts.append(f"created_at < {literal(self.end.isoformat())}::TIMESTAMPTZ")
        if self.where:
            # On its own line: it may end with a comment.
            parts.append(f"({self.where}\n)")
        return " AND ".join(parts) or "true"

    def to_json(self) -> dict[str, Any]:
        """Return the conditions that are given."""
        return {name: given for name, given in asdict(self).items() if given}

    @staticmethod
    def of_json(stored: dict[str, Any]) -> Selection:
        """Return the selection from its stored form."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
        }
        return Selection(**given)


def _time(option: str, given: str) -> datetime:
    try:
        found = datetime.fromisoformat(given)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise SetupError(
            f"{option} {given} is neither a day nor a time: write 2026-11-21 or 2026-11-21T08:30Z"
        ) from None
