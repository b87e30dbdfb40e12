"""One relay of a process at a time publishes what may have crashed the process.

Invariants:
- If the process crashes then, one event of one outbox is suspected.
- A relay waits for its turn `PATIENCE` seconds at most: another one's slow database or unavailable Kafka does
  not stop it. Then a crash may count against its event, too; three are needed for a dead letter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from outbox_pipelines.relay.run import Turn

PATIENCE: Final = 10.0
_LOOK_SECONDS: Final = 0.05


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
            time.sleep(_LOOK_SECONDS)

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
