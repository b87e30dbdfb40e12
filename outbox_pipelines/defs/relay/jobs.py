"""The two ways to run the relay."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
from typing import Any

import dagster as dg

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.relay import queue
from outbox_pipelines.defs.relay.assets import relay_shard


def config(**values: Any) -> dict[str, Any]:
    """The run configuration of a relay."""
    return {"ops": {relay_shard.name: {"config": values}}}


@dg.job(
    name=queue.SESSION,
    # Which shard, and of which code location, the supervisor's request says.
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Relays for about OUTBOX_SESSION_SECONDS (ten minutes), then hands over to its successor.

While another relay holds the shard, it waits as the warm successor: the hand-over takes milliseconds. Where
one waits already it ends at once, in success. Past its time it goes on until a successor waits, so a daemon
that is dead does not stop the relay. If sessions have every slot (`max_concurrent_runs`) and other runs are
queued, it ends before its successor starts: one of those runs goes first, then the successor.

Use: the sensor `relay_supervisor` launches it; by hand while the sensor is off. To end it, terminate the run:
what is in flight is published and settled first.

When it fails: the run says in one line what to mend. The supervisor tries again by itself, ever more slowly.
""",
)
def relay_session() -> None:
    relay_shard()


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    config=config(until_empty=True),
    description="""Publishes what is committed when it starts, then ends.

Use: without a relay that runs all the time; on a schedule of your own; after an outage, to see the backlog
drain. While a relay holds the shard it says who, and ends in success: that relay publishes everything.

When it fails: the run says in one line what to mend; run it again afterwards. Nothing is lost.
""",
)
def relay_once() -> None:
    relay_shard()
