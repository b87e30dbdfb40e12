"""Replays of days in Dagster: the asset of the days that were replayed, and the job."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Optional

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.defs import pages, places
from outbox_pipelines.defs.jobs import job
from outbox_pipelines.defs.outbox import NAME, Outbox
from outbox_pipelines.defs.pages import day_of, one_line
from outbox_pipelines.errors import NotReadyError, SetupError

if TYPE_CHECKING:
    from outbox_pipelines.replay.replay_record import Replay
    from outbox_pipelines.replay.replays import Counted
    from outbox_pipelines.replay.selection import Selection
    from outbox_pipelines.settings import Settings

LIMIT: Final = "outbox/replay"
"""Tag of the job's runs; `dagster.yaml` limits the runs with one value."""
_LIVE: Final = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
# Dagster adds these tags: to repetitions of a run, to runs of a backfill, and the user where it knows users.
_ROOT: Final = "dagster/root_run_id"
_BACKFILL: Final = "dagster/backfill"
_USER: Final = "user"
_LOOK_SECONDS: Final = 1.0
_LOG_SECONDS: Final = 20.0
# Rows of the tables.
_SHOWN: Final = 20
_TYPES: Final = 200
_LISTS: Final = ("topics", "aggregate_types", "aggregate_ids", "event_types", "ids")
# Options of the command in the errors of its package; commands in backquotes stay.
_OPTION: Final = re.compile(r"`[^`]*`|--([a-z-]+)")
_REPLAYS: Final = """\
The days whose events were sent again by the job `replay_events`.

A partition is a UTC day. Each entry names the replay (the header `replay-id` of its messages), who
launched it and why, how many events of each type were sent to which topics, and the archive files.
`outbox replay list` shows replays of the command line too.

Use: see what was replayed. There is nothing to materialize: launch the job `replay_events`.

When a day is missing here: its run failed or was terminated. Re-execute it: it continues the same replay.
"""
_REPLAY_EVENTS: Final = """\
Sends the published events of a day again, in the order of `seq`, marked with the header `replay-id`: from the
table, or from the archive if the day was dropped. Consumers skip them, unless a handler asks for replays.

Use: launch it for a day, with conditions (`event_types`, `where`, …) or without: it counts the events, and
sends nothing. Then launch it again with `send: {reason: …, to_topic: …}`. A backfill replays one day after
the other. Terminate a run to stop; re-execute it to continue behind what was sent. A re-executed run never
begins a second replay, and sends nothing if the first is complete.

When it fails: the run says in one line what to correct, and nothing was sent, or how far it is; re-execute it
afterwards. `outbox replay cancel ID` ends a replay that is not to be continued.
"""


class SendConfig(dg.Config):
    """Where to send the events, and why."""

    reason: str = Field(description="Reason, kept in outbox_replays")
    to_topic: str = Field(
        description="Topic, or a template in quotes such as '{topic}.replay'; '{topic}' alone sends to the "
        "topics of the originals, between live events"
    )
    create: bool = Field(default=False, description="Create missing topics")
    rate: int = Field(default=10_000, description="Events a second at most")


class ReplayConfig(dg.Config):
    """Which events of the day, and whether they are sent."""

    topics: list[str] = Field(default=[], description="Only events that were published to these topics")
    aggregate_types: list[str] = Field(default=[], description="Only events of these aggregate types")
    aggregate_ids: list[str] = Field(default=[], description="Only events of aggregates with these ids")
    event_types: list[str] = Field(default=[], description="Only events of these types")
    ids: list[str] = Field(default=[], description="Only the events with these ids")
    where: str = Field(
        default="",
        description="Only events that meet this condition in DuckDB's SQL on the archive's columns",
    )
    # Dagster does not know `SendConfig | None`.
    send: Optional[SendConfig] = Field(  # noqa: UP045
        default=None, description="Send the events; without it they are counted, and nothing is sent"
    )


def replays(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `replays`."""
    deps = ["events", *(["archive"] if outbox.has("archive") else [])]
    return outbox.spec("replays", _REPLAYS, {"kafka"}, deps=deps, partitions_def=outbox.days)


def replay_day(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `replay_day`."""

    @dg.op(name=outbox.name_of("replay_day"), pool=outbox.pool)
    def replay_day(context: dg.OpExecutionContext, config: ReplayConfig) -> None:
        """Count the selected events of the day of the run's partition, then send them if asked to."""
        day, send = str(day_of(context)), config.send
        with one_line(outbox), _names_of_config():
            from outbox_pipelines.replay import replay_topics, replays
            from outbox_pipelines.replay.selection import Selection

            settings = outbox.load_settings()
            conditions = {name: tuple(getattr(config, name)) for name in _LISTS}
            selection = Selection(since=day, until=day, where=config.where, **conditions)
            if send is not None:
                _check(send)
            try:
                target = send.to_topic if send else replay_topics.SAME
                found, notes = replays.preview(settings, selection, target)
            except replays.NothingSelectedError as error:
                # Of a backfill, some days have no event that is wanted.
                if _BACKFILL not in context.run.tags:
                    raise
                context.log.warning(f"{day}: {plain(str(error))}")
                found, notes = [], []
            for note in notes:
                context.log.warning(note)
            events = sum(each.events for each in found)
            counts: dict[str, Any] = {"events": events, "by_type": _by_type(found)}
            if send is not None and events:
                context.log.info(f"{counted(events, 'event')} of {day} selected")
                counts |= _send(context, outbox, settings, selection, send, counts)
            elif events:
                context.log.info(
                    f"{counted(events, 'event')} of {day} selected, nothing sent: launch the job again with "
                    "`send` to send them"
                )
            context.add_output_metadata({**counts, "replays": _recent(settings)})

    return replay_day


def _check(send: SendConfig) -> None:
    from outbox_pipelines.replay import replay_topics

    if not send.reason.strip():
        raise SetupError("reason is empty: set it; it is recorded")
    if send.rate < 1:
        raise SetupError(f"rate is {send.rate}: write events per second, at least 1")
    replay_topics.check(send.to_topic)


def _send(
    context: dg.OpExecutionContext,
    outbox: Outbox,
    settings: "Settings",
    selection: "Selection",
    send: SendConfig,
    counts: dict[str, Any],
) -> dict[str, Any]:
    """Replay, or continue the replay of the run that this one repeats; return what became of it."""
    started = time.monotonic()
    said = ""
    while True:
        waits = _before(context, outbox)
        if not waits:
            try:
                done = _replayed(context, settings, selection, send)
                break
            except NotReadyError as error:
                waits = str(error)
        if waits != said:
            context.log.info(plain(waits))
            said = waits
        time.sleep(_LOOK_SECONDS)
    if done.state != "done":
        remedy = (
            "re-execute this run to continue" if done.is_open else "launch the job again to begin another"
        )
        raise SetupError(
            f"replay {done.id} is {done.state}; {done.sent:,} of {done.events:,} events are sent: {remedy}"
        )
    facts: dict[str, Any] = {
        "replay": str(done.id),
        "sent": done.sent,
        "to_topic": plain(done.target),
        "reason": plain(done.reason),
        "by": plain(done.on_behalf_of or done.actor),
        "files": pages.table(done.files, "day", "file", "sha256"),
        "seconds": round(time.monotonic() - started, 3),
    }
    context.log.info(f"replay {done.id} is done: {counted(done.sent, 'event')} sent")
    # Also of a replay that was complete before: the process may have crashed right after it.
    context.log_event(
        dg.AssetMaterialization(
            outbox.key("replays"), partition=context.partition_key, metadata={**counts, **facts}
        )
    )
    return facts


def _replayed(
    context: dg.OpExecutionContext, settings: "Settings", selection: "Selection", send: SendConfig
) -> "Replay":
    """Begin a replay, or continue the one of the run that this one repeats; return it at its end."""
    from outbox_pipelines.replay import replays
    from outbox_pipelines.replay.replay_record import recorded

    run = context.run
    actor, user = f"Dagster run {run.tags.get(_ROOT, run.run_id)}", run.tags.get(_USER)
    wanted = {name: list(it) if isinstance(it, tuple) else it for name, it in selection.to_json().items()}
    for each in recorded(settings):
        is_same = (each.selection, each.target) == (wanted, send.to_topic)
        # Another user may repeat a run.
        if not is_same or not (each.on_behalf_of or "").endswith(actor):
            continue
        if not each.is_open:
            context.log.info(f"replay {each.id} of this run was {each.state} before: nothing is sent")
            return each
        context.log.info(f"replay {each.id} continues behind {counted(each.sent, 'event')}")
        return _attended(context, partial(replays.resume, settings, each.id, rate=send.rate))
    begin = partial(
        replays.begin,
        settings,
        selection,
        send.to_topic,
        reason=send.reason,
        actor=f"{user}, {actor}" if user else actor,
        creates=send.create,
        rate=send.rate,
    )
    return _attended(context, begin)


def _before(context: dg.OpExecutionContext, outbox: Outbox) -> str:
    """Return what this run waits for: the first of the job's runs in progress; empty if that is this one."""
    which = dg.RunsFilter(job_name=outbox.name_of("replay_events"), statuses=_LIVE, tags={NAME: outbox.name})
    for record in context.instance.get_run_records(which, ascending=True):
        run = record.dagster_run
        if run.run_id == context.run_id:
            break
        if places.of_run(run) == places.of_run(context.run):
            return (
                f"waiting for run {run.run_id[:8]}, which was launched before: one replay runs at a time. If "
                "its process has ended, terminate it"
            )
    return ""


def _attended(context: dg.OpExecutionContext, work: Callable[..., "Replay"]) -> "Replay":
    """Replay in a thread, and log the progress; a signal, which reaches the main thread, stops the replay."""
    from outbox_pipelines.core.answers import limited_after

    stop = threading.Event()
    latest: deque[tuple[Replay, int, str]] = deque(maxlen=1)
    log_at = time.monotonic() + _LOG_SECONDS

    def replay_until_stopped() -> "Replay":
        with limited_after(stop):
            return work(is_stopped=stop.is_set, progress=lambda *progress: latest.append(progress))

    with futures.ThreadPoolExecutor(1, "outbox-replay") as threads:
        replaying = threads.submit(replay_until_stopped)
        try:
            while not futures.wait([replaying], _LOOK_SECONDS).done:
                if latest and time.monotonic() > log_at:
                    replay, sent, trouble = latest.pop()
                    waits = f"; waiting for Kafka: {trouble}" if trouble else ""
                    context.log.info(plain(f"{sent:,} of {replay.events:,} events sent{waits}"))
                    log_at = time.monotonic() + _LOG_SECONDS
        except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
            stop.set()
            if replaying.exception() is None:
                replay = replaying.result()
                context.log.info(
                    f"replay {replay.id} is {replay.state}; {replay.sent:,} of {replay.events:,} events are "
                    "sent: re-execute this run to continue"
                )
            raise
        finally:
            stop.set()
    return replaying.result()


@contextmanager
def _names_of_config() -> Iterator[None]:
    """Let errors name the run's configuration instead of the command's options."""

    def named(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        name = found[1].replace("-", "_")
        if name == "create":
            return "`create: true`"
        return f"{name}s" if f"{name}s" in _LISTS else name

    try:
        yield
    except SetupError as error:
        raise type(error)(_OPTION.sub(named, str(error))) from None


def _by_type(found: Sequence["Counted"]) -> dg.MetadataValue[Any]:
    return pages.table(
        [
            {
                "event_type": each.event_type,
                "aggregate_type": each.aggregate_type,
                "events": each.events,
                "topic": each.topic,
                "example": each.example,
            }
            for each in sorted(found, key=lambda each: -each.events)[:_TYPES]
        ],
        *("event_type", "aggregate_type", "events", "topic", "example"),
    )


def _recent(settings: "Settings") -> dg.MetadataValue[Any]:
    """Return the newest replays, also those of the command line."""
    from outbox_pipelines.replay.replay_record import recorded

    return pages.table(
        [
            {
                "started (UTC)": f"{each.started_at:%Y-%m-%d %H:%M:%S}",
                "replay": str(each.id),
                "state": "stands still" if each.stands_still else each.state,
                "sent": each.sent,
                "events": each.events,
                "to_topic": each.target,
                "by": each.on_behalf_of or each.actor,
                "reason": each.reason,
            }
            for each in recorded(settings)[:_SHOWN]
        ],
        *("started (UTC)", "replay", "state", "sent", "events", "to_topic", "by", "reason"),
    )


def replay_events(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `replay_events`."""

    @job(outbox, "replay_events", _REPLAY_EVENTS, partitions_def=outbox.days, tags={LIMIT: outbox.name})
    def replay_events() -> None:
        replay_day(outbox).alias("replay_day")()

    return replay_events
