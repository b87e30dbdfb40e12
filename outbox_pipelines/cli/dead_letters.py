"""The commands `outbox dead-letters …`: events that could not be published, whichever table they are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli.dead_letter_group import Texts, make_group
from outbox_pipelines.core.text import short
from outbox_pipelines.relay import kinds
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.relay.kinds import Store
    from outbox_pipelines.relay.parking.dead_letter_store import DeadLetterRow


@contextmanager
def _table(settings: Settings) -> Iterator[Store]:
    yield kinds.of(settings).dead_letters(settings)


def _line(row: DeadLetterRow) -> str:
    when = row.failed_at or row.created_at
    return (
        f"{f'{when:%Y-%m-%d %H:%M:%S}' if when else '-'}  {row.id}  {short(row.event_type)}  "
        f"{short(row.aggregate_type)} {short(row.aggregate_id)}  {row.attempts} attempts  {row.error}"
    )


dead_letters = make_group(
    _table,
    Texts(
        group="""Events that could not be published: list, show, replay, discard.

        An existing table (OUTBOX_TABLE) has no audit and no discarded events.
        """,
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
    # An existing table has ids of any kind.
    click.STRING,
)
