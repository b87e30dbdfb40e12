"""The commands `outbox consumer offsets …`: what consumers with dedupe="offset" have recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import click

from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain


def make_group(connected: Callable[[Settings], AbstractContextManager[Any]]) -> click.Group:
    """Return the group of commands.

    Args:
        connected: connects to the consumer's database.
    """

    @click.group("offsets")
    def offsets() -> None:
        """List or forget the offsets of consumers with dedupe="offset"."""

    @offsets.command("list")
    @click.argument("source", required=False)
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @click.pass_obj
    def list_offsets(settings: Settings, source: str | None, as_json: bool) -> None:
        """List the next offset of each partition, of all consumers or of SOURCE."""
        from outbox_pipelines.consumer import operator_queries

        with connected(settings) as connection:
            rows = connection.execute(operator_queries.LIST_OFFSETS, {"source": source}).fetchall()
        if as_json:
            names = ("source", "topic", "partition", "next_offset", "topic_id", "moved_at")
            click.echo(
                json.dumps({"offsets": [dict(zip(names, row, strict=True)) for row in rows]}, default=str)
            )
            return
        for of, topic, partition, following, _, moved_at in rows:
            moved = f"moved at {moved_at:%Y-%m-%d %H:%M:%S %Z}"
            click.echo(plain(f"{of}: {topic} {partition}, next offset {following:,}, {moved}"))
        if not rows:
            click.echo("no consumer has recorded offsets")

    @offsets.command("forget")
    @click.argument("source")
    @click.option("--topic", help="Only the offsets of this topic.")
    @click.pass_obj
    def forget(settings: Settings, source: str, topic: str | None) -> None:
        """Forget the offsets of a consumer whose processes are all stopped.

        For a topic that was created again, and before a return to dedupe="id". Events that Kafka delivers
        again are handled again.
        """
        from outbox_pipelines.consumer import operator_queries

        with connected(settings) as connection:
            given = {"source": source, "topic": topic}
            deleted = connection.execute(operator_queries.FORGET_OFFSETS, given).rowcount
        click.echo(plain(f"{source}: offsets of {deleted} partitions forgotten"))
        if not deleted:
            raise SystemExit(1)

    return offsets
