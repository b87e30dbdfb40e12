"""The process as its relays see it: implements `relay.run.Host` for one outbox.

Invariants:
- One relay of a process at a time publishes what may have crashed the process: if it crashes then, one event
  of one outbox is suspected.
- A relay waits for its turn `PATIENCE` seconds at most: another one's slow database or unavailable Kafka does
  not stop it. Then a crash may count against its event, too; three are needed for a dead letter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from outbox_pipelines.database import Connection
from outbox_pipelines.relay.fleet import fleet_sql
from outbox_pipelines.relay.fleet.division import Division, Unit
from outbox_pipelines.relay.fleet.standby import fleet_key
from outbox_pipelines.relay.fleet.watch import FleetWatch
from outbox_pipelines.relay.fleet.watcher import Watcher
from outbox_pipelines.relay.lease.owner_session import Ownership
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.run import Host, Turn, Watch
from outbox_pipelines.settings import ProcessSettings

# Seconds between two checks whether another process should relay the shard.
_LOOK_SECONDS: Final = 2.0
PATIENCE: Final = 10.0
_TURN_POLL: Final = 0.05


class FleetHost(Host):
    """Of one relay.

    Args:
        suspicion: shared by all relays of the process: see `FleetTurn`.
        stands_by: whether this process stands by for other shards of the outbox.
    """

    # The waits of 0.2 s become 1 s: what matters wakes the thread.
    patience = 5.0
    # Events come every 20 ms at most.
    report_poll = 0.01

    def __init__(
        self,
        settings: ProcessSettings,
        unit: Unit,
        watcher: Watcher,
        division: Division,
        suspicion: threading.Lock,
        stands_by: Callable[[], bool],
    ) -> None:
        self._stands_by = stands_by
        self._unit = unit
        self._fleet = fleet_key(settings)
        self._watcher = watcher
        self._division = division
        self._suspicion = suspicion
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def watch(
        self, shard: Shard, connection: Connection, *, ending: Callable[[], bool], end: threading.Event
    ) -> Watch:
        info = connection.info
        database = shard.identity.rpartition("-")[0], info.host, info.port, info.user
        return FleetWatch(self._watcher.lend, connection, database, ending)

    def must_hand_over(self, owned: Ownership) -> bool:
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        if owned.is_awaited():
            # A relay of its own: processes of a fleet do not wait in this way.
            return True
        ((is_alone,),) = owned.execute(fleet_sql.NONE_STANDS_BY, self._fleet)
        ((standbys,),) = [(0,)] if is_alone else owned.execute(fleet_sql.STANDBYS, self._fleet)
        others = max(0, standbys - self._stands_by())
        self._division.saw(self._unit, others=others, is_free=False)
        return self._division.must_pass_on(self._unit)

    def turn(self) -> Turn:
        return FleetTurn(self._suspicion)


class FleetTurn(Turn):
    """One relay's turn.

    Args:
        lock: shared by all relays of the process.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._has_it = False
        self._waits_since: float | None = None

    def wait(self, ending: Callable[[], bool]) -> None:
        while not self.take() and not ending():
            time.sleep(_TURN_POLL)

    def take(self) -> bool:
        if not self._has_it:
            self._has_it = self._lock.acquire(blocking=False)
        if self._has_it:
            self._waits_since = None
            return True
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        return now - self._waits_since > PATIENCE

    def give_back(self) -> None:
        self._waits_since = None
        if self._has_it:
            self._has_it = False
            self._lock.release()
