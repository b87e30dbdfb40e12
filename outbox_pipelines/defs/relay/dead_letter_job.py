"""Jobs of an operator in Dagster's launchpad: the same as `outbox dead-letters` and `outbox cutover`."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.defs import pages
from outbox_pipelines.defs.jobs import op_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line, require_seconds
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.relay.parking.dead_letter_store import DeadLetterRow, Replayed

# Rows of the table.
_MOST = 50
# In a message; the table has all rows.
_NAMED = 10
_CONDITIONS = ("ids", "event_type", "aggregate_type", "aggregate_id", "error")


class DeadLettersConfig(dg.Config):
    """Which dead letters to act on, the action, and the reason."""

    action: Literal["list", "replay", "discard"] = Field(default="list", description="Action")
    reason: str = Field(default="", description="Reason, kept in the audit; required to replay or discard")
    ids: list[str] = Field(default=[], description="Only the events with these ids")
    event_type: str | None = Field(default=None, description="Only events of this type")
    aggregate_type: str | None = Field(default=None, description="Only events of this aggregate type")
    aggregate_id: str | None = Field(default=None, description="Only events of the aggregate with this id")
    error: str | None = Field(default=None, description="Only events whose error contains this text")
    everything: bool = Field(default=False, description="All dead letters; only without ids and filters")
    wait_seconds: float = Field(
        default=60.0, description="Seconds that a replay waits for a relay to try the events"
    )


def dead_letters_job(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `dead_letters_job`."""

    @op_job(outbox, "dead_letters", _DEAD_LETTERS_JOB, repeats=False)
    def act_on_dead_letters(context: dg.OpExecutionContext, config: DeadLettersConfig) -> None:
        """List the selected dead letters, then replay or discard them if requested."""
        require_seconds("wait_seconds", config.wait_seconds)
        given = {name: getattr(config, name) for name in _CONDITIONS}
        _check(config, given)
        actor = f"Dagster run {context.run_id[:8]}"
        done = 0
        replayed = None
        with one_line(outbox):
            settings = outbox.load_settings()
            letters = kinds.of(settings).dead_letters(settings)
            found = letters.find(given, limit=_MOST, discarded=False)
            if config.action == "replay":
                replayed = letters.replay(
                    given, actor=actor, reason=config.reason, seconds=config.wait_seconds
                )
                done = replayed.done
            elif config.action == "discard":
                done = letters.act("discard", given, actor=actor, reason=config.reason)
        context.add_output_metadata(
            {
                "found": found.total,
                "done": done,
                "by_reason": found.by_error,
                "dead_letters": _table(found.rows),
            }
        )
        if replayed is not None:
            _tell_replayed(context, replayed, config.wait_seconds)
        elif config.action == "discard":
            context.log.info(f"discarded: {done:,} of {found.total:,}")
        else:
            context.log.info(f"dead letters found: {found.total:,}; shown in the table: {len(found.rows):,}")

    return act_on_dead_letters


def _check(config: DeadLettersConfig, given: dict[str, Any]) -> None:
    for name, value in given.items():
        texts = value if isinstance(value, list) else [value]
        if any(text is not None and not text.strip() for text in texts):
            raise dg.Failure(f"{name} has an empty text: give one, or leave it out", allow_retries=False)
    is_empty = not any(given.values())
    if config.action != "list" and is_empty is not config.everything:
        raise dg.Failure("set ids or a filter, or set only `everything`", allow_retries=False)
    if config.action != "list" and not config.reason.strip():
        raise dg.Failure("reason is empty: set it; it is recorded in the audit", allow_retries=False)


def _tell_replayed(context: dg.OpExecutionContext, replayed: "Replayed", seconds: float) -> None:
    """Log the outcome of a replay.

    Raises:
        Failure: some events are dead letters again.
    """
    if replayed.untried is None:
        context.log.info(f"pending again: {replayed.done:,}")
        return
    published = replayed.done - len(replayed.again) - replayed.untried
    context.log.info(f"replayed: {replayed.done:,}; published: {published:,}")
    if replayed.untried:
        context.log.warning(
            f"{replayed.untried:,} were not tried within {seconds:.0f} s: check with `outbox status` whether "
            "a relay is active and Kafka is available; a relay tries them once both are"
        )
    if replayed.again:
        first = "; ".join(plain(f"{row.id} ({row.error})") for row in replayed.again[:_NAMED])
        more = len(replayed.again) - _NAMED
        raise dg.Failure(
            f"dead letters again: {len(replayed.again):,} of {counted(replayed.done, 'replayed event')}: "
            + first
            + (f"; and {more:,} more" if more > 0 else "")
            + ". Correct the cause, then replay them",
            metadata={"dead_again": _table(replayed.again), "published": published},
            allow_retries=False,
        )


def _table(rows: Iterable["DeadLetterRow"]) -> dg.MetadataValue[Any]:
    return pages.table(
        [
            {
                "failed_at": f"{row.failed_at:%Y-%m-%d %H:%M:%S}" if row.failed_at else "",
                "id": str(row.id),
                "event_type": row.event_type,
                "aggregate": f"{row.aggregate_type} {row.aggregate_id}",
                "attempts": row.attempts,
                "reason": row.error or "",
            }
            for row in rows
        ],
        *("failed_at", "id", "event_type", "aggregate", "attempts", "reason"),
    )


_DEAD_LETTERS_JOB: Final = """\
Lists, replays or discards dead letters, like `outbox dead-letters`.

Use: launch it without configuration to list them (the step's output has a table). Then launch it again with
`action` replay or discard, a `reason`, and `ids`, a filter or `everything`. A replayed event is tried
once, immediately; if it is refused again, it becomes a dead letter with the new reason, and the run fails.
Each action writes a row to `outbox_audit`: the run, the time, the reason, the events. An existing table
(OUTBOX_TABLE) has no audit and no discarded events; a replayed row of it is pending, as a new one.

When it fails: the run says in one line what to change in its configuration, and nothing was changed; or it
names the events that are dead letters again, and why: correct the cause, then replay them.
"""


class CutoverConfig(dg.Config):
    """What to change to."""

    to: Literal["look", "cdc", "polling"] = Field(
        default="look", description="look changes nothing: it shows the slot, and what a change would do"
    )
    wait_seconds: float = Field(
        default=60.0, description="How long to wait for running transactions, or for the relay, at most"
    )


def cutover_job(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `cutover_job`."""

    @op_job(outbox, "cutover", _CUTOVER_JOB, repeats=False)
    def change_source(context: dg.OpExecutionContext, config: CutoverConfig) -> None:
        """Change where relays read events; log each step."""
        from outbox_pipelines.relay.read.slot import slot_cutover
        from outbox_pipelines.relay.read.slot.slot_cutover import read

        require_seconds("wait_seconds", config.wait_seconds)
        with one_line(outbox):
            settings = outbox.load_settings()
            if config.to == "look":
                other = "polling" if read(settings).source == "cdc" else "cdc"
                planned = plain("; ".join(slot_cutover.plan(settings, other)))
                context.log.info(f"a change to {other} would do: {planned}")
            else:
                slot_cutover.run(
                    settings,
                    config.to,
                    seconds=config.wait_seconds,
                    say=lambda line: context.log.info(plain(line)),
                )
            found = read(settings)
        context.add_output_metadata(
            {
                "source": found.source,
                "slot": found.slot or "",
                "log_bytes": found.retained_bytes or 0,
                "problems": found.problems,
                "state": pages.report(found.lines()),
            }
        )

    return change_source


_CUTOVER_JOB: Final = """\
Changes where relays read events, like `outbox cutover`: from a replication slot (cdc) or between snapshots
(polling).

Use: launch it without configuration to see the slot and the plan. Then launch it again with `to`: cdc or
polling. Writers and relays continue: no event is lost, repeated or reordered. The run's log has a
line for each step; its output is the state of the slot afterwards. The role of the settings must own the
outbox and have the right REPLICATION.

When it fails: the run says in one line what is missing (wal_level, a right), or what it waited for. Events
are published as before. Launch it again, with any target.
"""
