"""The consumers of a reconciliation, `[consumers.NAME]`, and where each records the events it has handled.

Invariants:
- A consumer is expected to handle only the topics and event types that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked, resolved
from outbox_pipelines.core.secret import Secret, check_dsn, register_dsn

_NONE: Final = Secret()


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer that is expected to have handled the events of a day."""

    name: str
    source: str
    """The name of the consumer in `processed_events`."""
    group: str
    """Its consumer group in Kafka."""
    dsn: Secret = _NONE
    """Empty: OUTBOX_DSN."""
    schema: str = ""
    """Empty: OUTBOX_SCHEMA."""
    topics: tuple[str, ...] = ()
    """Topics that it reads; empty: all."""
    event_types: tuple[str, ...] = ()
    """Event types that it has handlers for; empty: all."""
    handles_others: bool = False
    """Whether its source also handles events that are not of this outbox."""
    keep_days: int | None = None
    """The number of days with which `outbox consumer prune` is run there."""


def read_consumers(given: Any) -> dict[str, Consumer]:
    """Return the consumers of a table, by name; raise `ValueError` that says how to correct it."""
    return each_checked(as_table(given).items(), _consumer)


def _consumer(name: str, table: Any) -> Consumer:
    if not isinstance(table, dict):
        raise ValueError(f"has {name} outside a consumer's section: write [consumers.billing] above it")

    def one(entry: str, value: Any) -> Any:
        if entry == "dsn":
            try:
                value = resolved(value)
            except ValueError as error:
                raise ValueError(f"[{name}] dsn {error}") from None
        if entry not in _ENTRIES:
            raise ValueError(f"[{name}] has an unknown entry {entry!r}: use {', '.join(_ENTRIES)}")
        fits, example = _ENTRIES[entry]
        if not fits(value):
            shown = "what it is" if entry == "dsn" else repr(value)
            raise ValueError(f"[{name}] {entry} cannot be {shown}: write for example {entry} = {example}")
        if entry == "dsn":
            register_dsn(value)
            try:
                check_dsn(value)
            except ValueError as error:
                raise ValueError(f"[{name}] dsn {error}") from None
        return value

    given: dict[str, Any] = {"source": name, **each_checked(table.items(), one)}
    for entry in ("topics", "event_types"):
        given[entry] = tuple(given.get(entry, ()))
    given["dsn"] = Secret(given.get("dsn", ""))
    return Consumer(name=name, **{"group": given["source"], **given})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_days(value: Any) -> bool:
    return type(value) is int and value >= 1


# Whether a value is valid, and an example.
_ENTRIES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "source": (_is_text, '"billing"'),
    "group": (_is_text, '"billing"'),
    "dsn": (_is_text, '"postgresql://user@host/db"'),
    "schema": (_is_text, '"public"'),
    "topics": (_is_list, '["order-events"]'),
    "event_types": (_is_list, '["order.placed"]'),
    "handles_others": (_is_flag, "true"),
    "keep_days": (_is_days, "14"),
}
