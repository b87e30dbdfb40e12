"""The change between polling and CDC in Dagster's launchpad: the same as `outbox cutover`."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
from typing import Final, Literal

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import pages
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line, require_seconds


class CutoverConfig(dg.Config):
    """What to change to."""

    to: Literal["look", "cdc", "polling"] = Field(
        default="look", description="look changes nothing: it shows the slot, and what a change would do"
    )
    seconds: float = Field(
        default=60.0, description="How long to wait for running transactions, or for the relay, at most"
    )


def cutover_job(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `cutover_job`."""

    @outbox.op_job("cutover", _CUTOVER_JOB, repeats=False)
    def change_source(context: dg.OpExecutionContext, config: CutoverConfig) -> None:
        """Change where relays read events; log each step."""
        from outbox_pipelines.relay.read.slot import slot_cutover
        from outbox_pipelines.relay.read.slot.slot_cutover import read

        require_seconds("seconds", config.seconds)
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
                    seconds=config.seconds,
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
