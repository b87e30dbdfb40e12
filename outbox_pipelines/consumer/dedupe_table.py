"""A table of processed events that a service has had before this consumer, and keeps.

Invariants:
- A description that cannot be right is rejected before any connection is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event import Event
from outbox_pipelines.errors import SetupError

_VALUES: Final = "id, idempotency_key, header:NAME or payload:NAME"
# Names are written into statements whose parameters begin with % or :.
_REFUSED: Final = frozenset("%:\\\"'\0")


@dataclass(frozen=True)
class DedupeTable:
    """A table in which consumers of your own record processed events; see `Consumer(dedupe_table=…)`.

    Args:
        name: the table, as `processed_events` or `schema.processed_events`, without quotes.
        column: the column that identifies the event; unique alone, or together with `source`.
        value: what is in that column: the event's `id`, its `idempotency_key`, `header:NAME`, or
            `payload:NAME` for a member of the payload. An event without it becomes a dead letter.
        source: the column with the name of the consumer, if there is one.
        source_value: the name that your own consumers write there; by default the `source` of the consumer.
        processed_at: the column that is set to the time; necessary if it has no default.
        received_at: the same, in an inbox.
        payload: the column that is set to the payload, in an inbox.
        is_inbox: a row whose `processed_at` is NULL is received and not processed: its event is handled, and
            `processed_at` is set in the same transaction.
        constants: other columns that need a value, and the text of that value.

    Raises:
        SetupError: a name or a value is invalid.
    """

    name: str
    column: str = "event_id"
    value: str = "id"
    source: str | None = None
    source_value: str | None = None
    processed_at: str | None = None
    received_at: str | None = None
    payload: str | None = None
    is_inbox: bool = False
    constants: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.name.split(".")
        if len(parts) > 2 or not all(parts):
            raise SetupError(
                f"dedupe_table has the name {self.name!r}: write a name, or a schema, a dot and a name, "
                "without quotes"
            )
        for name in (*parts, *self.columns):
            if not name or _REFUSED & set(name):
                raise SetupError(
                    f"dedupe_table has the name {name!r}: give a name that is not empty and has no quotes, "
                    "%, : or backslashes"
                )
        if len(set(self.columns)) < len(self.columns):
            twice = next(each for each in self.columns if self.columns.count(each) > 1)
            raise SetupError(f"dedupe_table uses the column {twice} twice: give each column one content")
        kind, colon, rest = self.value.partition(":")
        if (kind, bool(colon), bool(rest)) not in (
            ("id", False, False),
            ("idempotency_key", False, False),
            ("header", True, True),
            ("payload", True, True),
        ):
            raise SetupError(f"dedupe_table has value={self.value!r}: give {_VALUES}")
        if self.source_value is not None and not (self.source and self.source_value):
            raise SetupError(
                "dedupe_table has source_value: name its column too, as source=…, and no empty value"
            )
        if self.is_inbox and self.processed_at is None:
            raise SetupError(
                "dedupe_table has is_inbox=True: name the column that says so, as processed_at=…"
            )

    @property
    def schema(self) -> str | None:
        """The schema, if it is given."""
        return self.name.rpartition(".")[0] or None

    @property
    def table(self) -> str:
        """The name without the schema."""
        return self.name.rpartition(".")[2]

    @property
    def columns(self) -> list[str]:
        """All columns that are written."""
        named = (self.column, self.source, self.processed_at, self.received_at, self.payload)
        return [*(each for each in named if each is not None), *self.constants]

    def value_of(self, event: Event) -> str:
        """Return the text that identifies an event.

        Raises:
            UnreadableError: the event has none.
        """
        kind, _, name = self.value.partition(":")
        if kind == "id":
            return event.id
        found = event.idempotency_key if kind == "idempotency_key" else None
        if kind == "header":
            found = event.headers.get(name)
        if kind == "payload":
            found = _member(event, name)
        if not found:
            what = "idempotency key" if kind == "idempotency_key" else f"{kind} {name!r}"
            raise UnreadableError(f"{event} has no {what}, which dedupe_table {self.name} needs")
        return found


def _member(event: Event, name: str) -> str | None:
    try:
        body = event.payload
    except ValueError:
        return None
    found = body.get(name) if isinstance(body, dict) else None
    return str(found) if isinstance(found, str | int) and not isinstance(found, bool) else None
