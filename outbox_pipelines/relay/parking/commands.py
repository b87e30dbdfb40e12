"""The commands `outbox dead-letters …`: events that could not be published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from outbox_pipelines.dead_letter_group import Store, Texts, make_group
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.relay.parking.dead_letters import DeadLetterRow


class _Table:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def find(self, given: Mapping[str, Any], *, limit: int, discarded: bool) -> Any:
        from outbox_pipelines.relay.parking.dead_letters import Filter, find

        return find(self._settings, Filter(**given), limit=limit, discarded=discarded)

    def show(self, given: UUID) -> list[dict[str, Any]]:
        from outbox_pipelines.relay.parking.dead_letters import show

        return show(self._settings, given)

    def act(self, action: Any, given: Mapping[str, Any], *, actor: str, reason: str) -> int:
        from outbox_pipelines.relay.parking.dead_letters import Filter, act

        return act(self._settings, action, Filter(**given), actor=actor, reason=reason)


@contextmanager
def _table(settings: Settings) -> Iterator[Store]:
    yield _Table(settings)


def _line(row: DeadLetterRow) -> str:
    return (
        f"{row.failed_at:%Y-%m-%d %H:%M:%S}  {row.id}  {row.event_type}  {row.aggregate_type} "
        f"{row.aggregate_id}  {row.attempts} attempts  {row.error}"
    )


dead_letters = make_group(
    _table,
    Texts(
        group="Events that could not be published: list, show, replay, discard.",
        show="""Show everything of one dead letter or parked event, as JSON: content, reason, audit.

        If several events have the id, each is printed.
        """,
        replay="""Let the relay try dead letters again: each once, immediately.

        One that is refused again is a dead letter again, with the new reason. Later events of its aggregate
        have been published already, unless OUTBOX_ON_DEAD_LETTER=block: consumers see the replayed one late.
        """,
        discard="Discard dead letters: they are not published, and no alert counts them. Content is kept.",
        unknown="{} is neither parked nor a dead letter",
    ),
    [
        click.option("--event-type", help="Of this event type."),
        click.option("--aggregate-type", help="Of this aggregate type."),
        click.option("--aggregate-id", help="Of the aggregate with this id."),
    ],
    _line,
)
