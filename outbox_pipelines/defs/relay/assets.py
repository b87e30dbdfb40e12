"""The asset that stands for what the relay has published."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import logging
import time
from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from outbox_pipelines.defs.events import OWNERS, events
from outbox_pipelines.defs.relay import queue
from outbox_pipelines.defs.relay.owner import owner_of
from outbox_pipelines.defs.relay.session import Progress, Session
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.topics import topic_key
from outbox_pipelines.errors import SetupError

_LOG = logging.getLogger(__name__)

# A report takes 2.5 KB of Dagster's storage in PostgreSQL, 8 KB in SQLite: often while somebody may look at
# the run just started, seldom afterwards.
_FIRST_REPORTS = 10.0
_LATER_REPORTS = 60.0


class RelayConfig(dg.Config):
    """What a relay is to do; without any, a session on shard 0."""

    shard: int = Field(default=0, ge=0, description="which shard to relay")
    until_empty: bool = Field(
        default=False,
        description="publish what is committed at the start, then end; do not wait for the shard",
    )


@dg.asset(
    key=["outbox", "relay"],
    deps=[events],
    group_name="outbox",
    owners=OWNERS,
    kinds={"postgres", "kafka"},
    # Nothing is materialized by a run that finds its shard held.
    output_required=False,
    description="""The committed events, published to Kafka in order.

One materialization for each session: how many events, how fast, how late. While it runs, a session observes
the asset: every ten seconds at first, later every minute, if something was published. The plots show both.
Each topic that it sends to is observed too, once when it is first seen and once at the end.

Use: let the sensor `relay_supervisor` start the sessions. By hand: the job `relay_session`, or `relay_once`.

When it fails: the error says in one line what to mend (database, schema, broker). Nothing is lost: the next
session goes on where this one ended. An event that Kafka refuses does not end a session: it is parked.
""",
)
def relay(
    context: dg.AssetExecutionContext, config: RelayConfig, outbox_pipelines: OutboxResource
) -> Iterator[dg.MaterializeResult[Any]]:
    # Here, because definitions are to load without the drivers.
    from outbox_pipelines.relay.service import ShardHeldError, default_owner
    from outbox_pipelines.relay.shards import ShardLostError

    interrupted: BaseException | None = None
    progress: Progress | None = None
    try:
        settings = outbox_pipelines.settings()
        session = Session(
            settings,
            shard=config.shard,
            owner=owner_of(context.run.run_id, default_owner()),
            until_empty=config.until_empty,
            hand_over_after=None if config.until_empty else settings.session_seconds,
        )
        try:
            with session:
                _attend(context, session, config, settings.session_seconds)
        except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
            # The session has ended in order all the same.
            interrupted = error
        progress = session.progress()
        if progress is not None:
            _observe_topics(context, progress.topics, progress)
        session.result()
    except ShardHeldError as error:
        context.log_event(
            dg.AssetObservation(context.asset_key, description=str(error), metadata={"held": str(error)})
        )
    except (SetupError, ShardLostError) as error:
        metadata = _metadata(progress) if progress else {}
        raise dg.Failure(str(error), metadata=metadata, allow_retries=False) from None
    if progress is not None:
        yield dg.MaterializeResult(metadata=_metadata(progress))
    if interrupted is not None and (config.until_empty or _is_cancelled(context)):
        raise interrupted


def _is_cancelled(context: dg.AssetExecutionContext) -> bool:
    """Whether a person ended the run: a session that a deployment or Ctrl-C ends is short, not failed."""
    run = context.instance.get_run_by_id(context.run.run_id)
    return run is not None and run.status is dg.DagsterRunStatus.CANCELING


def _attend(
    context: dg.AssetExecutionContext, session: Session, config: RelayConfig, session_seconds: float
) -> None:
    """Observes what a session does, until it ends or other runs need its slot."""
    before: Progress | None = None
    report_at = 0.0
    while not session.wait(_FIRST_REPORTS):
        now = session.progress()
        if now is None:
            continue
        overdue = now.seconds - session_seconds
        if not config.until_empty and _gives_turn(context, config.shard, overdue, session_seconds):
            return
        if time.monotonic() < report_at or now.events == (before.events if before else 0):
            continue
        # A little less: the next look is to be the next report.
        report_at = time.monotonic() + (0.0 if now.seconds < _LATER_REPORTS else 0.9 * _LATER_REPORTS)
        metadata = _metadata(now, since=before)
        _observe(
            context,
            context.asset_key,
            f"{now.events:,} events, {metadata['events_per_second']:,.0f} a second",
            metadata,
        )
        _observe_topics(context, now.topics - (before.topics if before else frozenset()), now)
        before = now


def _gives_turn(
    context: dg.AssetExecutionContext, shard: int, overdue: float, session_seconds: float
) -> bool:
    """Whether the session has to end although its successor is still queued."""
    if overdue < 0:
        return False
    try:
        turn = queue.turn(
            context.instance,
            context.run,
            shard,
            overdue=overdue,
            session_seconds=session_seconds,
            now=time.time(),
        )
        if turn is not None:
            turn.give(context.instance)
            context.log.info(turn.reason)
        return turn is not None
    except Exception as error:  # noqa: BLE001 - whatever its storage raises
        _LOG.warning("the run queue was not read: %s", error)
        return False


def _observe_topics(context: dg.AssetExecutionContext, topics: frozenset[str], progress: Progress) -> None:
    """Says that the session sends to these: its whole count where that is of one topic alone."""
    # A count for each topic would take the relay a look at each event.
    metadata = {"events": progress.events} if len(progress.topics) == 1 else {}
    for topic in sorted(topics):
        _observe(context, topic_key(topic), "a relay session sends events to it", metadata)


def _observe(
    context: dg.AssetExecutionContext, key: dg.AssetKey, description: str, metadata: dict[str, Any]
) -> None:
    # Dagster's storage may be away for a moment, or locked: no reason to end a relay.
    try:
        context.log_event(dg.AssetObservation(key, description=description, metadata=metadata))
    except Exception as error:  # noqa: BLE001 - whatever its storage raises
        # Not by the context's log: it is stored there too.
        _LOG.warning("an observation was not stored: %s", error)


def _metadata(progress: Progress, since: Progress | None = None) -> dict[str, float]:
    """Numbers under the same names in observations and materializations, so that each name is one plot."""
    events = progress.events - (since.events if since else 0)
    seconds = progress.seconds - (since.seconds if since else 0.0)
    metadata = {
        "events": progress.events,
        "duration_seconds": round(progress.seconds, 3),
        "events_per_second": round(events / seconds, 1) if seconds else 0.0,
        "waited_seconds": round(progress.waited, 3),
    }
    if progress.lag is not None and progress.greatest_lag is not None:
        metadata["lag_ms"] = round(progress.lag * 1000, 1)
        metadata["greatest_lag_ms"] = round(progress.greatest_lag * 1000, 1)
    return metadata
