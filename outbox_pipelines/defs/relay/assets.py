"""The asset of the published events, the op that relays a shard, and the jobs that run it."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import logging
import time
from typing import Any, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, markdown, plain
from outbox_pipelines.defs.jobs import job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.relay import queue
from outbox_pipelines.defs.relay.relay_session import Progress, RelaySession
from outbox_pipelines.defs.relay.supervision import owner_of
from outbox_pipelines.defs.topics import topic_key
from outbox_pipelines.errors import SetupError

_LOG = logging.getLogger(__name__)

# A report takes 2.5 KB of Dagster's storage in PostgreSQL, 8 KB in SQLite: it is frequent while a user may
# watch a new run, and rare afterwards.
_FIRST_REPORTS = 10.0
_LATER_REPORTS = 60.0
# Nothing to materialize: a session that was killed would show as "Failed" while the next one relays, and
# "Materialize all" on a page would start another.
_RELAY: Final = """\
The committed events, published to Kafka in order.

A running session observes the asset if it has published events: every ten seconds at first, later every
minute. An observation has the number of events since the last report, the rate and the latency. At the end of
a session, a materialization has the session's totals, whose names begin with `session_`. The plots show both.
The session also observes each topic it publishes to, at the first event and at its end.

Use: let the sensor `relay_supervisor` start the sessions. By hand: the job `relay_session`, or `relay_once`.

When a session fails: its run says in one line what to correct (database, schema, broker). Nothing is lost:
the next session continues where this one ended. An event that Kafka refuses does not end a session: it is
parked. The check `shards_relayed` of `outbox/health` shows whether a relay is active now.
"""
STEP: Final = "relay_shard"
"""The step of both jobs, for every outbox."""
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
_RELAY_ONCE: Final = """\
Publishes the events that are committed when it starts, then ends.

Use: instead of a permanent relay; on your own schedule; after an outage, to watch the backlog drain. While
another relay owns the shard, the run reports the owner and ends in success: that relay publishes all events.

When it fails: the run says in one line what to correct; run it again afterwards. Nothing is lost.
"""


class RelayConfig(dg.Config):
    """What a relay does. Default: a session on shard 0."""

    shard: int = Field(default=0, description="Shard to relay")
    until_empty: bool = Field(
        default=False,
        description="Publish the events committed before the start, then end; do not wait for the shard",
    )


def relay(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `relay`."""
    return outbox.spec("relay", _RELAY, {"postgres", "kafka"})


def relay_shard(outbox: Outbox, job: str) -> dg.OpDefinition:
    """Return the op of a job that relays."""

    # A name for each job: two ops of one name clash.
    @dg.op(name=outbox.name_of(f"{job}_shard"))
    def relay_shard(context: dg.OpExecutionContext, config: RelayConfig) -> None:
        """Publish a shard's events until the session time ends or, with `until_empty`, until none is left."""
        from outbox_pipelines.relay.core.outcomes import ShardLostError
        from outbox_pipelines.relay.service import ShardOwnedError, default_owner

        interrupted: BaseException | None = None
        progress: Progress | None = None
        try:
            settings = outbox.load_settings()
            session = RelaySession(
                settings,
                shard=config.shard,
                owner=owner_of(context.run.run_id, default_owner()),
                until_empty=config.until_empty,
                hand_over_after=None if config.until_empty else settings.session_seconds,
            )
            try:
                with session:
                    _attend(context, outbox, session, config, settings.session_seconds)
            except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
                # The session has still ended properly.
                interrupted = error
            progress = session.progress()
            if progress is not None:
                _observe_topics(context, outbox, progress.topics, progress)
            session.result()
        except ShardOwnedError as error:
            context.log_event(
                dg.AssetObservation(
                    outbox.key("relay"),
                    description=markdown(str(error)),
                    metadata={"owned_by": plain(str(error))},
                )
            )
        except (SetupError, ShardLostError) as error:
            metadata = _of_session(progress) if progress else {}
            why = plain(outbox.by_its_variables(str(error)))
            raise dg.Failure(why, metadata=metadata, allow_retries=False) from None
        if progress is not None:
            context.log_event(dg.AssetMaterialization(outbox.key("relay"), metadata=_of_session(progress)))
        if interrupted is not None and (config.until_empty or _is_cancelled(context)):
            raise interrupted

    return relay_shard


def _is_cancelled(context: dg.OpExecutionContext) -> bool:
    """Return whether a user terminated the run. A session ended by a deployment or Ctrl-C has not failed."""
    run = context.instance.get_run_by_id(context.run.run_id)
    return run is not None and run.status is dg.DagsterRunStatus.CANCELING


def _attend(
    context: dg.OpExecutionContext,
    outbox: Outbox,
    session: RelaySession,
    config: RelayConfig,
    session_seconds: float,
) -> None:
    """Observe a session's progress until it ends or other runs need its slot."""
    before: Progress | None = None
    report_at = 0.0
    while not session.wait(_FIRST_REPORTS):
        now = session.progress()
        if now is None:
            continue
        overdue = now.seconds - session_seconds
        if not config.until_empty and _gives_turn(context, outbox, config.shard, overdue, session_seconds):
            return
        if time.monotonic() < report_at or now.events == (before.events if before else 0):
            continue
        # Slightly shorter than the interval, so that the next check is not too early for a report.
        report_at = time.monotonic() + (0.0 if now.seconds < _LATER_REPORTS else 0.9 * _LATER_REPORTS)
        metadata = _since(now, before, session.take_greatest_latency())
        _observe(
            context,
            outbox.key("relay"),
            f"{counted(int(metadata['events']), 'event')}, {metadata['events_per_second']:,.0f} a second; "
            f"{now.events:,} in this session",
            metadata,
        )
        _observe_topics(context, outbox, now.topics - (before.topics if before else frozenset()))
        before = now


def _gives_turn(
    context: dg.OpExecutionContext, outbox: Outbox, shard: int, overdue: float, session_seconds: float
) -> bool:
    """Return whether the session must end although its successor is still queued."""
    if overdue < 0:
        return False
    try:
        turn = queue.turn(
            context.instance,
            context.run,
            outbox,
            shard,
            overdue=overdue,
            session_seconds=session_seconds,
            now=time.time(),
        )
        if turn is not None:
            turn.give(context.instance)
            context.log.info(plain(turn.reason))
        return turn is not None
    except Exception as error:  # noqa: BLE001 - whatever its storage raises
        _LOG.warning("cannot read Dagster's run queue: %s", error)
        return False


def _observe_topics(
    context: dg.OpExecutionContext, outbox: Outbox, topics: frozenset[str], ended: Progress | None = None
) -> None:
    """Observe the topics of the session; at its end with its event count if it published to only one."""
    # To count events per topic, the relay would have to inspect each event.
    metadata = {"session_events": ended.events} if ended and len(ended.topics) == 1 else {}
    for topic in sorted(topics):
        _observe(context, topic_key(outbox, topic), "a relay session publishes to this topic", metadata)


def _observe(
    context: dg.OpExecutionContext, key: dg.AssetKey, description: str, metadata: dict[str, Any]
) -> None:
    # Dagster's storage may be briefly unavailable or locked: this does not end a relay.
    try:
        context.log_event(dg.AssetObservation(key, description=markdown(description), metadata=metadata))
    except Exception as error:  # noqa: BLE001 - whatever its storage raises
        # Not `context.log`, which writes to the same storage.
        _LOG.warning("cannot store an observation in Dagster: %s", error)


# Each name is one plot: it is used either in observations or in materializations.
def _since(now: Progress, before: Progress | None, greatest_latency: float | None) -> dict[str, float]:
    """Return the numbers since the last report."""
    events = now.events - (before.events if before else 0)
    seconds = now.seconds - (before.seconds if before else 0.0)
    return {
        "events": events,
        "events_per_second": round(events / seconds, 1) if seconds else 0.0,
        **({} if now.latency is None else {"latency_ms": round(now.latency * 1000, 1)}),
        **({} if greatest_latency is None else {"greatest_latency_ms": round(greatest_latency * 1000, 1)}),
    }


def _of_session(ended: Progress) -> dict[str, float]:
    """Return the totals of a session."""
    rate = ended.events / ended.seconds if ended.seconds else 0.0
    greatest = ended.greatest_latency
    return {
        "session_events": ended.events,
        "session_seconds": round(ended.seconds, 3),
        "session_events_per_second": round(rate, 1),
        "session_waited_seconds": round(ended.waited, 3),
        **({} if greatest is None else {"session_greatest_latency_ms": round(greatest * 1000, 1)}),
    }


def config(**values: Any) -> dict[str, Any]:
    """Return the run configuration of a relay."""
    return {"ops": {STEP: {"config": values}}}


def relay_session(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `relay_session`."""

    @job(
        outbox,
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


def relay_once(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `relay_once`."""

    @job(outbox, "relay_once", _RELAY_ONCE, config=config(until_empty=True))
    def relay_once() -> None:
        relay_shard(outbox, "relay_once").alias(STEP)()

    return relay_once
