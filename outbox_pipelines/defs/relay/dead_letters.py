"""Dead letters from Dagster's launchpad: what `outbox dead-letters replay` and `discard` do."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import dagster as dg
from pydantic import Field

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.resources import OutboxResource

if TYPE_CHECKING:
    from outbox_pipelines.relay.dead_letters import DeadLetterRow


class DeadLettersConfig(dg.Config):
    """Which dead letters, what is to be done with them, and why."""

    action: Literal["list", "replay", "discard"] = Field(default="list", description="what to do")
    reason: str = Field(default="", description="why; needed to replay or discard, it stands in the audit")
    ids: list[str] = Field(default=[], description="ids of events")
    event_type: str | None = Field(default=None, description="of this event type")
    aggregate_type: str | None = Field(default=None, description="of this aggregate type")
    aggregate_id: str | None = Field(default=None, description="of the aggregate with this id")
    error: str | None = Field(default=None, description="whose reason contains this")
    everything: bool = Field(
        default=False, description="all of them, where neither ids nor a filter are given"
    )


@dg.op
def act_on_dead_letters(
    context: dg.OpExecutionContext, config: DeadLettersConfig, outbox_pipelines: OutboxResource
) -> None:
    """Lists those that are meant, then does what is asked."""
    # Here, because definitions are to load without the drivers.
    from outbox_pipelines.errors import SetupError
    from outbox_pipelines.relay import dead_letters

    settings = outbox_pipelines.settings()
    try:
        which = dead_letters.Filter(
            ids=tuple(UUID(one) for one in config.ids),
            event_type=config.event_type,
            aggregate_type=config.aggregate_type,
            aggregate_id=config.aggregate_id,
            error=config.error,
        )
    except ValueError as error:
        raise dg.Failure(f"{error}: ids are those that `list` shows", allow_retries=False) from None
    if config.action != "list" and which.is_empty is not config.everything:
        raise dg.Failure(
            "name ids, or give a filter, or set everything (and nothing else)", allow_retries=False
        )
    found = dead_letters.find(settings, which)
    done = 0
    if config.action != "list":
        try:
            done = dead_letters.act(
                settings,
                config.action,
                which,
                actor=f"Dagster run {context.run_id[:8]}",
                reason=config.reason,
            )
        except SetupError as error:
            raise dg.Failure(str(error).replace("--reason", "reason"), allow_retries=False) from None
    context.log.info(f"{found.total} dead letters are meant; {done} {config.action}ed")
    context.add_output_metadata(
        {"found": found.total, "done": done, "by_reason": found.by_error, "dead_letters": _table(found.rows)}
    )


def _table(rows: Iterable["DeadLetterRow"]) -> dg.MetadataValue[Any]:
    columns = ("failed_at", "id", "event_type", "aggregate", "attempts", "reason")
    return dg.MetadataValue.table(
        [
            dg.TableRecord(
                {
                    "failed_at": f"{row.failed_at:%Y-%m-%d %H:%M:%S}",
                    "id": str(row.id),
                    "event_type": row.event_type,
                    "aggregate": f"{row.aggregate_type} {row.aggregate_id}",
                    "attempts": row.attempts,
                    "reason": row.error or "",
                }
            )
            for row in rows
        ],
        schema=dg.TableSchema([dg.TableColumn(name) for name in columns]),
    )


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    name="dead_letters",
    description="""Lists dead letters, and replays or discards them: what `outbox dead-letters` does.

Use: launch it as it is to list them (the step's output has a table). Then launch it again with `action`
replay or discard, a `reason`, and which ones: `ids`, or a filter, or `everything`. A replayed event is tried
once, at once; refused again, it is a dead letter again, with the new reason. Each action leaves a row in
`outbox_audit`: the run, the time, the reason, the events.

When it fails: the run says in one line what to change in its configuration; nothing was done.
""",
)
def dead_letters_job() -> None:
    act_on_dead_letters()
