"""The relay as users start it: wait for the shard, relay it, and start over if the shard is lost.

Invariants:
- Configuration problems (schema, credentials, settings) are found before the relay waits, and are errors. A
  server that does not answer is an outage, also at the start: the relay retries until it is back. A run until
  empty and a session of Dagster report the outage instead.
- A lost shard is not an error: the relay becomes a standby. Events that were in flight are read again.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum

import psycopg

from outbox_pipelines.core.answers import limited_after
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.core.outages import is_outage, server_of
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import locks
from outbox_pipelines.errors import RefusedError, UnavailableError
from outbox_pipelines.relay import kinds
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.lease.owner_session import Ownership, beating, noticing
from outbox_pipelines.relay.lease.shard import Settled
from outbox_pipelines.relay.lease.shard_ownership import NoSuchShardError
from outbox_pipelines.relay.memory import collecting_rarely, return_large_blocks
from outbox_pipelines.relay.parking import notify
from outbox_pipelines.relay.run import ALONE, Host, Run, Totals
from outbox_pipelines.relay.shared import SharedBlockedAggregates
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import ProcessSettings

_LOG = logging.getLogger(__name__)
# Seconds between two attempts to take the lock: the gap when the shard changes its owner.
_STANDBY_POLL = 0.025
# How often a standby checks whether a session that is not a relay owns the lock.
_INTRUDER_SECONDS = 2.0
# A container that is restarted in place has the same host name and process id each time.
_TOKEN = secrets.token_hex(4)


class Standby(Enum):
    """What a relay does if another relay owns its shard."""

    SKIP = "exit at once"
    REFUSE = "exit and name the owner"
    NEXT = "wait as the only successor; exit if another successor waits"
    ANY = "wait, together with any number of other standbys"


class ShardOwnedError(Exception):
    """Another relay owns the shard, and this relay must not wait; the message names the owner."""


def default_owner() -> str:
    """Return host, process id and a token of this process; they identify the owner of a shard.

    Every call in one process returns the same text, so a relay that starts over does not count as a crash.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{_TOKEN}"


def relay(
    settings: ProcessSettings,
    *,
    shard: int | None = None,
    owner: str | None = None,
    stop: threading.Event | None = None,
    standby: Standby = Standby.ANY,
    until_empty: bool = False,
    hand_over_after: float | None = None,
    on_take: Callable[[int], None] | None = None,
    on_progress: Callable[[Settled], None] | None = None,
    metrics: Metrics | None = None,
    host: Host = ALONE,
) -> Totals:
    """Relay one shard until `stop` is set, in the calling thread.

    Args:
        shard: the shard; None means the first free one or, with `until_empty`, all shards in turn.
        until_empty: publish the events that are committed at the start, then return.
        hand_over_after: seconds after which the relay passes the shard to a successor that waits for it.
        on_take: called with the shard after the relay has taken it.
        on_progress: called about once a second while the relay settles events.
        metrics: where to count; None counts nothing.
        host: the process, which may have other relays.

    Raises:
        SetupError: the database, the schema or the broker is not set up correctly.
        ShardOwnedError: another relay owns the shard (or waits for it), and `standby` forbids waiting.
    """
    return_large_blocks()
    metrics = metrics or Metrics()
    run = Run(
        stop=stop or threading.Event(),
        until_empty=until_empty,
        hand_over_after=hand_over_after,
        on_progress=on_progress or (lambda settled: None),
        on_dead_letter=notify.reporter(metrics),
        metrics=metrics,
        host=host,
    )
    owner = owner or default_owner()
    numbers = kinds.of(settings).shards(settings) if until_empty and shard is None else [shard]
    totals = Totals()
    for number in numbers:
        totals += _relay(settings, number, owner, standby, on_take or (lambda shard: None), run)
    return totals


def _relay(
    settings: ProcessSettings,
    shard: int | None,
    owner: str,
    standby: Standby,
    on_take: Callable[[int], None],
    run: Run,
) -> Totals:
    """Relay one shard until the run ends; start over if it is lost, or after an outage."""
    kind, stop, metrics = kinds.of(settings), run.stop, run.metrics
    has_worked = has_taken = False
    pauses, totals, outage = _pauses(), Totals(), RepeatedLines(_LOG)
    with limited_after(stop):
        while True:
            ownership: Ownership | None = None
            worker: kinds.Worker | None = None
            lost = threading.Event()
            sessions = ExitStack()
            sessions.enter_context(limited_after(lost))
            try:
                kind.check(settings)
                blocked = SharedBlockedAggregates()
                producer = IdempotentProducer(settings)
                if not has_worked:
                    _look_for_kafka(producer, run)
                ownership = kind.own(settings, shard, owner)
                has_worked = True
                metrics.reached()
                sessions.enter_context(noticing(settings, ownership, lost))
                if not _take(ownership, standby, stop, producer.idle):
                    break
                # The worker sends its own heartbeats, but only once it runs.
                with beating(ownership.beat, settings.lease_seconds / 5):
                    metrics.took(ownership.shard)
                    worker = kind.make_worker(settings, ownership, producer, blocked, run)
                    on_take(ownership.shard)
                    has_taken, pauses = True, _pauses()
                    outage.end("outage", "relaying again")
                with collecting_rarely():
                    worker.run()
                break
            except NoSuchShardError:
                # The number of shards has changed: other relays now publish the events of this shard.
                if not has_taken:
                    raise
                break
            except (ShardLostError, UnavailableError, psycopg.OperationalError) as error:
                if isinstance(error, psycopg.Error) and not is_outage(error):
                    raise
                if stop.is_set():
                    # The next relay reads the events that were in flight again.
                    _LOG.warning("stopped while %s", first_line(error))
                    break
                # A run until empty reports the outage; a service waits for its end.
                if run.until_empty and not isinstance(error, ShardLostError):
                    raise
                # A setting that is wrong from the start is reported at once, and a session does not wait.
                if not has_worked and (isinstance(error, RefusedError) or run.hand_over_after is not None):
                    raise
                outage.log("outage", "starting over: %s", first_line(error))
            finally:
                if worker is not None:
                    totals += worker.totals
                if ownership is not None:
                    ownership.close()
                sessions.close()
                metrics.returned()
            stop.wait(next(pauses))
    return totals


def _look_for_kafka(producer: IdempotentProducer, run: Run) -> None:
    """Raise a wrong setting before the relay waits; a run with an end also raises an outage.

    A service takes its shard and waits as the owner: during an outage its relay is not missing.
    """
    try:
        producer.connect()
    except UnavailableError as error:
        ends = run.until_empty or run.hand_over_after is not None or run.stop.is_set()
        if ends or isinstance(error, RefusedError):
            raise
        _LOG.warning("waiting for %s: %s", server_of(str(error)), first_line(error))


def _pauses() -> Iterator[float]:
    """Yield the pauses between attempts in an outage, in seconds; the first is 0, for a change of owner."""
    yield 0.0
    pause = 0.2
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(pause * 2, 5.0)


def _take(ownership: Ownership, standby: Standby, stop: threading.Event, idle: Callable[[], None]) -> bool:
    """Wait for the shard as `standby` says; return False if the relay is stopped first.

    Args:
        idle: called about once a second.
    """
    is_next = False
    # A relay that was killed a moment ago still has what this one tries to take.
    for _ in locks.tries():
        if ownership.try_take():
            return True
        is_next = standby in (Standby.NEXT, Standby.ANY) and ownership.try_wait()
        if is_next or standby in (Standby.ANY, Standby.SKIP) or stop.is_set():
            break
    if standby in (Standby.REFUSE, Standby.SKIP):
        raise ShardOwnedError(ownership.describe_owner())
    if standby is Standby.NEXT and not is_next:
        raise ShardOwnedError(f"{ownership.describe_owner()}, and another relay already waits for it")
    look_at, seen = time.monotonic() + _INTRUDER_SECONDS, None
    idle_at = 0.0
    while not stop.wait(_STANDBY_POLL):
        if ownership.try_take():
            return True
        is_next = is_next or ownership.try_wait()
        if time.monotonic() >= idle_at:
            idle_at = time.monotonic() + 1.0
            idle()
            ownership.end_silent()
        if time.monotonic() >= look_at:
            look_at, found = time.monotonic() + _INTRUDER_SECONDS, ownership.intruder()
            # Only if seen twice, because a relay that is just taking the shard looks like an intruder. Then
            # once for each session.
            if found is not None and seen == (found[0], False):
                _LOG.warning("%s", found[1])
                seen = found[0], True
            elif found is None or seen is None or seen[0] != found[0]:
                seen = None if found is None else (found[0], False)
    return False
