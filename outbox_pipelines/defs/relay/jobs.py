"""The two jobs that run the relay."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
from typing import Any, Final

import dagster as dg

from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.relay import queue
from outbox_pipelines.defs.relay.assets import relay_shard

STEP: Final = "relay_shard"
"""The step of both jobs, for every outbox."""


def config(**values: Any) -> dict[str, Any]:
    """Return the run configuration of a relay."""
    return {"ops": {STEP: {"config": values}}}


_RELAY_SESSION: Final = """\
Relays for about OUTBOX_SESSION_SECONDS (ten minutes), then hands over to its successor.

While another relay owns the shard, the session waits as the warm successor: the handover takes milliseconds.
If a successor already waits, the session ends at once, in success. After its time it continues until a
successor waits, so a stopped daemon does not stop the relay. If sessions take every slot
(`max_concurrent_runs`) and other runs are queued, it ends before its successor starts: one of those runs goes
first, then the successor.

Use: the sensor `relay_supervisor` launches it; launch it by hand while the sensor is off. To end it,
terminate the run: events in flight are published and settled first.

When it fails: the run says in one line what to correct. The supervisor retries automatically, with increasing
pauses.
"""


def relay_session(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `relay_session`."""

    @outbox.job(
        "relay_session",
        _RELAY_SESSION,
        # The supervisor starts the next session, after a pause.
        repeats=False,
        # The supervisor's request names the shard and the code location.
        tags=queue.SESSION,
    )
    def relay_session() -> None:
        relay_shard(outbox, "relay_session").alias(STEP)()

    return relay_session


_RELAY_ONCE: Final = """\
Publishes the events that are committed when it starts, then ends.

Use: instead of a permanent relay; on your own schedule; after an outage, to watch the backlog drain. While
another relay owns the shard, the run reports the owner and ends in success: that relay publishes all events.

When it fails: the run says in one line what to correct; run it again afterwards. Nothing is lost.
"""


def relay_once(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `relay_once`."""

    @outbox.job("relay_once", _RELAY_ONCE, config=config(until_empty=True))
    def relay_once() -> None:
        relay_shard(outbox, "relay_once").alias(STEP)()

    return relay_once
