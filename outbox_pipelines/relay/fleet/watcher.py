"""One thread that waits for new events on behalf of all readers of a process.

Invariants:
- A reader lends its own connection, which sees the lock of its shard.
- Questions are spread over time: a hundred at once would delay each other, and everything else.
- If this thread fails, every reader is woken with the failure.
"""

from __future__ import annotations

import heapq
import math
import random
import selectors
import threading
import time
from collections import deque
from collections.abc import Hashable
from itertools import count
from typing import Final

from outbox_pipelines.relay.fleet.questions import Database
from outbox_pipelines.relay.fleet.watch import FleetWatch

# With many databases, questions that are due within this time are asked together, and so are their answers
# taken: a wake-up of the thread costs more than they.
_TOGETHER: Final = 0.01
# The same while one of them has events.
_TOGETHER_BUSY: Final = 0.004
_BUSY_SECONDS: Final = 1.0
_MANY: Final = 8
# At most this long until a reader is noticed that has just been lent.
_NOTICE_SECONDS: Final = 0.01


class Watcher:
    """The thread; a context in which it runs."""

    def __init__(self) -> None:
        self._lent: deque[FleetWatch] = deque()
        self._databases: dict[Hashable, Database] = {}
        self._due: list[tuple[float, int, Hashable]] = []
        """A heap; an entry is valid if its database is due then."""
        self._entries = count()
        self._busy_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._end = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outbox-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, when no reader waits any more."""
        self._end.set()
        self._thread.join()
        self._selector.close()

    def lend(self, watch: FleetWatch) -> None:
        """Wait for a reader."""
        self._lent.append(watch)
        # Appended first: whichever of the two sees the other wakes the reader.
        if self._failure is not None:
            watch.error = self._failure
            watch.woken.set()

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._round()
            failure: BaseException = RuntimeError("the process of the relay ends")
        except BaseException as error:  # noqa: BLE001 - raised in every reader
            failure = error
        self._failure = failure
        for database in self._databases.values():
            database.end(failure)
        while self._lent:
            watch = self._lent.popleft()
            watch.error = failure
            watch.woken.set()

    def _round(self) -> None:
        now = time.monotonic()
        while self._lent:
            self._take(self._lent.popleft(), now)
        together = _TOGETHER_BUSY if now < self._busy_until else _TOGETHER
        while self._due and self._due[0][0] <= now + together:
            due, _, key = heapq.heappop(self._due)
            database = self._databases.get(key)
            if database is None or database.due != due:
                continue
            if database.is_idle:
                del self._databases[key]
            else:
                database.turn(now)
                if database.is_busy:
                    self._busy_until = now + _BUSY_SECONDS
                self._schedule(key, database.due)
        if len(self._databases) > _MANY:
            time.sleep(together)
        until = min(self._due[0][0] if self._due else math.inf, now + _NOTICE_SECONDS)
        for found, _ in self._selector.select(max(0.0, until - time.monotonic())):
            found.data.answer()

    def _take(self, watch: FleetWatch, now: float) -> None:
        """Ask for a reader from now on."""
        database = self._databases.get(watch.database)
        if database is None:
            database = self._databases[watch.database] = Database(self._selector)
            database.due = math.inf
        database.add(watch)
        due = min(database.due, now + watch.every(now) * random.random())
        if due < database.due:
            database.due = due
            self._schedule(watch.database, due)

    def _schedule(self, key: Hashable, due: float) -> None:
        heapq.heappush(self._due, (due, next(self._entries), key))
