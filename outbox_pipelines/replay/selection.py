"""Which events a replay sends, as an operator says it.

Invariants:
- A selection without any condition, and one that no event can meet, is refused: it is a mistake.
- A condition in SQL is one expression; what it may do is limited where it is evaluated.
- It selects the same events whenever it is evaluated: a resume asks again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

import duckdb

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.days.archive.question import refusal
from outbox_pipelines.errors import SetupError

_DAY = re.compile(r"\d{4}-\d\d-\d\d")
# DuckDB knows this of functions, but not of its macros, and not of names without parentheses.
_UNSTABLE: Final = """
SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'
UNION SELECT unnest(['ago', 'current_localtime', 'current_localtimestamp', 'current_time',
                     'current_timestamp', 'localtime', 'localtimestamp', 'pg_conf_load_time',
                     'pg_postmaster_start_time'])"""


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
            try:
                duckdb.SQLExpression(self.where)
            except duckdb.Error as error:
                raise SetupError(
                    f"--where is not a condition in SQL ({first_line(error)}): write for example "
                    "\"payload->>'total' = '5'\""
                ) from None
            if found := _unstable(self.where):
                raise SetupError(
                    f"--where has {found}, whose value changes: a resume would select other events. Write "
                    "a value, such as TIMESTAMPTZ '2026-11-21 08:30Z'"
                )

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
        parts = [f"{name} IN ({', '.join(map(quoted, given))})" for name, given in listed if given]
        if self.since:
            parts.append(f"created_at >= {quoted(self.start.isoformat())}::TIMESTAMPTZ")
        if self.until:
            parts.append(f"created_at < {quoted(self.end.isoformat())}::TIMESTAMPTZ")
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


def quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def rejected(error: Exception) -> SetupError:
    """Return the error of a condition that DuckDB does not evaluate, or of events that it does not read."""
    if not isinstance(error, duckdb.Error):
        return SetupError(f"the selected events cannot be read: {first_line(error)}. Check --where")
    return SetupError(str(refusal(error)).replace("the query failed", "--where cannot be evaluated"))


def _unstable(where: str) -> str:
    """Return a function in a condition that gives another value at another time; empty if there is none."""
    with duckdb.connect() as connection:
        unstable = {name for (name,) in connection.execute(_UNSTABLE).fetchall()}
        ((parsed,),) = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {where}\n"]).fetchall()
    return next((name for name in _names(json.loads(parsed)) if name in unstable), "")


def _names(node: Any) -> Iterator[str]:
    """Yield the functions and columns of a statement as DuckDB gives it."""
    if isinstance(node, list):
        for each in node:
            yield from _names(each)
    elif isinstance(node, dict):
        name = str(node.get("function_name", "")).casefold()
        # Of one time: up to today.
        arguments = node.get("arguments") or node.get("children") or ()
        yield "current_date" if name == "age" and len(arguments) == 1 else name
        if node.get("type") == "COLUMN_REF":
            yield node["column_names"][-1].casefold()
        for each in node.values():
            yield from _names(each)


def _time(option: str, given: str) -> datetime:
    try:
        found = datetime.fromisoformat(given)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise SetupError(
            f"{option} {given} is neither a day nor a time: write 2026-11-21 or 2026-11-21T08:30Z"
        ) from None
