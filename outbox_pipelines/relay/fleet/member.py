"""One outbox of a fleet: is standby for its shards, and relays those that this process owns.

Invariants:
- Each failure is logged once with the outbox's name, and the step is tried again after growing pauses; no
  other outbox waits for it.
- A shard is relayed by the ordinary relay, in threads of its own.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Final

import psycopg

from outbox_pipelines.core import log
from outbox_pipelines.core.answers import limited_after
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from outbox_pipelines.relay.fleet.division import Division, Unit
from outbox_pipelines.relay.fleet.fleet_host import FleetHost
from outbox_pipelines.relay.fleet.standby import Standby
from outbox_pipelines.relay.fleet.watcher import Watcher
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import ProcessSettings

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 1.0
_COUNT_EVERY: Final = 4
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# A failure within this time after a start has the same cause as the one before.
_CALM_SECONDS: Final = 10.0
# A hundred relays that start at once would wait for each other, and for Kafka, longer than their limits.
_STARTS: Final = 4
_START_PATIENCE: Final = 2.0


class Starts:
    """Limits how many relays start at once; the wait is short, because a database may not answer."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_STARTS)

    def begin(self) -> Callable[[], None]:
        """Wait for a free slot; return a function to call after the start has succeeded or failed."""
        if not self._free.acquire(timeout=_START_PATIENCE):
            return lambda: None
        once = threading.Lock()

        def done() -> None:
            if once.acquire(blocking=False):
                self._free.release()

        return done


class Shared:
    """State that the outboxes of a process share.

    Args:
        outboxes: how many there are.
        stop: set when all must end.
        owner: identifies this process; None: host and process id.
    """

    def __init__(self, outboxes: int, stop: threading.Event, owner: str | None = None) -> None:
        self.stop = stop
        self.owner = owner
        self.watcher = Watcher()
        self.division = Division(outboxes, time.monotonic)
        self.suspicion = threading.Lock()
        self.starts = Starts()
        self.lock = threading.Lock()
        self.names: dict[object, str] = {}
        """By what identifies an outbox's tables: the outbox that was seen with them first."""
        self.namesakes: set[tuple[str, str]] = set()
        """Outboxes that are the same tables, of which the log says so."""


class Member:
    """One outbox.

    Args:
        on_take: called with the number of a shard that this process has taken.
        on_state: called when the outbox has been reached, with None, or could not be, with the reason.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        shared: Shared,
        metrics: Callable[[], Metrics],
        *,
        on_take: Callable[[str, int], None],
        on_state: Callable[[str | None], None],
    ) -> None:
        self.name = settings.name
        self.totals = Totals()
        self._settings = settings
        self._shared = shared
        self._metrics = metrics
        self._on_take = on_take
        self._on_state = on_state
        self._changed = threading.Event()
        self._relays: dict[int, tuple[threading.Thread, threading.Event]] = {}
        self._shards: set[int] = set()
        self._trouble: str | None = None
        self._failed = False
        self._stands_by = False
        self._thread = threading.Thread(target=self._run, name="outbox-member", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """End, once `Shared.stop` is set."""
        self._changed.set()
        for _, stop in list(self._relays.values()):
            stop.set()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _run(self) -> None:
        log.outbox.set(self.name)
        with limited_after(self._shared.stop):
            self._take_part()
        for thread, stop in list(self._relays.values()):
            stop.set()
            thread.join()

    def _take_part(self) -> None:
        pause = _FIRST_PAUSE
        while not self._shared.stop.is_set():
            began = time.monotonic()
            try:
                self._stand_by()
                # All shards are relayed here: until one of them ends, or their number changes.
                # `wake` comes after `stop`, a relay's end after its failure: a look may have taken it for
                # another change.
                if not (self._shared.stop.is_set() or self._failed):
                    self._changed.wait()
                    self._changed.clear()
            except Exception as error:  # noqa: BLE001 - the other outboxes go on
                self._note(error)
            if self._failed:
                self._failed = False
                self._shared.division.lost_sight(self.name)
                if time.monotonic() - began > max(pause, _CALM_SECONDS):
                    pause = _FIRST_PAUSE
                self._shared.stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _recover(self) -> None:
        """Record that nothing prevents relaying; log the end of what did."""
        if self._trouble is not None:
            self._trouble = None
            _LOG.warning("relaying again")
        self._on_state(None)

    def _note(self, error: Exception) -> None:
        self._failed = True
        is_expected = isinstance(error, SetupError | psycopg.Error | service.ShardOwnedError)
        text = first_line(error) if is_expected else f"{type(error).__name__}: {error}"
        if text != self._trouble:
            self._trouble = text
            _LOG.error("%s", text, exc_info=None if is_expected else error)
        self._on_state(text)

    def _stand_by(self) -> None:
        """Take all shards that are due; return when all are taken, or one has failed."""
        has_begun = self._shared.starts.begin()
        try:
            standby = Standby(self._settings)
        finally:
            has_begun()
        try:
            self._stands_by = True
            self._look_for_namesakes(standby)
            rounds = 0
            while not self._shared.stop.is_set() and not self._failed:
                if rounds % _COUNT_EVERY == 0:
                    self._shards = set(standby.shards())
                    others = max(0, standby.standbys() - 1)
                looks = list(standby.looks(self._shards))
                rounds += 1
                for look in looks:
                    is_ours = look.shard in self._relays
                    if not is_ours:
                        unit = Unit(self.name, look.shard)
                        seen = others + (not look.is_free)
                        self._shared.division.saw(unit, others=seen, is_free=look.is_free)
                    # One that has failed since the round began is no longer ours: it has its pause first.
                    may_start = look.is_free and not is_ours and not self._failed
                    if may_start and self._shared.division.take(unit):
                        self._start(unit)
                if self._shards <= self._relays.keys():
                    return
                if not any(look.is_free for look in looks):
                    self._recover()
                # More often than the lease: a silent session ends.
                pause = min(_LOOK_SECONDS, self._settings.lease_seconds / 3)
                self._changed.wait(pause * random.uniform(0.8, 1.2))
                self._changed.clear()
        finally:
            self._stands_by = False
            standby.close()

    def _look_for_namesakes(self, standby: Standby) -> None:
        """Warn that two names lead to one outbox: harmless, and probably a mistake."""
        with self._shared.lock:
            first = self._shared.names.setdefault(standby.tables, self.name)
            is_known = (first, self.name) in self._shared.namesakes
            self._shared.namesakes.add((first, self.name))
        if first != self.name and not is_known:
            _LOG.warning(
                "outboxes %s and %s are the same tables: one of the two relays them, the other stands by. "
                "Remove one from outbox.toml",
                *(first, self.name),
            )

    def _start(self, unit: Unit) -> None:
        stop = threading.Event()
        thread = threading.Thread(
            target=self._relay, args=[unit, stop], name=f"outbox-{self.name}", daemon=True
        )
        self._relays[unit.shard] = thread, stop
        try:
            thread.start()
        except BaseException:
            self._ended(unit)
            raise

    def _ended(self, unit: Unit) -> None:
        del self._relays[unit.shard]
        self._shared.division.gave_back(unit)

    def _relay(self, unit: Unit, stop: threading.Event) -> None:
        log.outbox.set(self.name)
        shared = self._shared
        host = FleetHost(
            self._settings,
            unit,
            shared.watcher,
            shared.division,
            shared.suspicion,
            lambda: self._stands_by,
        )

        def on_take(shard: int) -> None:
            has_begun()
            self._recover()
            self._on_take(self.name, shard)
            # If it was lost in between, the number of shards may have changed.
            self._changed.set()

        has_begun = shared.starts.begin()
        try:
            if not shared.stop.is_set():
                self.totals += service.relay(
                    self._settings,
                    shard=unit.shard,
                    owner=shared.owner,
                    stop=stop,
                    standby=service.Standby.SKIP,
                    on_take=on_take,
                    metrics=self._metrics(),
                    host=host,
                )
        except service.ShardOwnedError:
            # Another process has taken it.
            pass
        except Exception as error:  # noqa: BLE001 - the other outboxes go on
            self._note(error)
        finally:
            has_begun()
            self._ended(unit)
            self._changed.set()
