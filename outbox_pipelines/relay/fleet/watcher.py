"""One thread that waits for new events on behalf of all readers of a process.

Invariants:
- A reader lends its own connection, which sees the lock of its shard. Outboxes that are schemas of one
  database are asked about by one of their connections.
- Nothing here waits for an answer: a database that does not answer delays its own outboxes only.
- Questions are spread over time: a hundred at once would delay each other, and everything else.
- If a round fails, every reader is woken with the failure: its relay begins again, as after each failure.
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
from contextlib import suppress
from itertools import count
from typing import Final

import psycopg
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from outbox_pipelines.relay.fleet.watch import BUSY, IDLE, MANY, ONE, FleetWatch, message

# With many databases, questions that are due within this time are asked together, and so are their answers
# taken: a wake-up of the thread costs more than they.
_TOGETHER: Final = 0.01
# The same while one of them has events.
_TOGETHER_BUSY: Final = 0.004
_BUSY_SECONDS: Final = 1.0
_MANY: Final = 8
# At most this long until a reader is noticed that has just been lent.
_NOTICE_SECONDS: Final = 0.01
_FAILED_SECONDS: Final = 1.0
# A question waits for no lock: without an answer for so long, something in between has lost it.
_LOST_SECONDS: Final = 60.0
_ENDS: Final = "the process of the relay ends"


class Watcher:
    """The thread; a context in which it runs."""

    def __init__(self) -> None:
        self._lent: deque[FleetWatch] = deque()
        self._databases: dict[Hashable, DatabaseWatch] = {}
        self._due: list[tuple[float, int, Hashable]] = []
        """A heap; an entry is valid if its database is due then."""
        self._entries = count()
        self._busy_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._end = threading.Event()
        self._has_ended = False
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
        if self._has_ended:
            watch.error = RuntimeError(_ENDS)
            watch.woken.set()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._round()
            except Exception as error:  # noqa: BLE001 - raised in every reader
                self._wake_all(error)
                self._end.wait(_FAILED_SECONDS)
        self._has_ended = True
        self._wake_all(RuntimeError(_ENDS))

    def _wake_all(self, error: Exception) -> None:
        databases, self._databases = self._databases, {}
        self._due.clear()
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        for database in databases.values():
            database.end(error)
        while self._lent:
            watch = self._lent.popleft()
            watch.error = error
            watch.woken.set()

    def _round(self) -> None:
        now = time.monotonic()
        while self._lent:
            # Lent until it is taken, so that a failure wakes it.
            self._take(self._lent[0], now)
            self._lent.popleft()
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
            database = self._databases[watch.database] = DatabaseWatch(self._selector)
            database.due = math.inf
        database.add(watch)
        due = min(database.due, now + watch.every(now) * random.random())
        if due < database.due:
            database.due = due
            self._schedule(watch.database, due)

    def _schedule(self, key: Hashable, due: float) -> None:
        heapq.heappush(self._due, (due, next(self._entries), key))


class DatabaseWatch:
    """The readers that wait for events of one database."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._waiting: list[FleetWatch] = []
        self._asked: list[FleetWatch] = []
        """Those that the open question is about; the first one's connection asks."""
        self._leader: FleetWatch | None = None
        """The one whose connection the selector watches."""
        self._socket = -1
        self._result: PGresult | None = None
        self.due = 0.0
        """When the next question is due."""
        self.is_busy = False
        """Whether one of the readers has had events lately."""

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._asked)

    def add(self, watch: FleetWatch) -> None:
        self._waiting.append(watch)

    def turn(self, now: float) -> None:
        """Wake readers that must not wait longer, and query for the others; return when to do so again."""
        self._ask_again(now)
        watches = self._waiting or self._asked
        every = min([watch.every(now) for watch in watches], default=BUSY)
        self.is_busy = every < IDLE and bool(watches)
        # From when it was due: what is late once would come together with others from then on.
        self.due = self.due + every if self.due + every > now else now + every * random.random()

    def _ask_again(self, now: float) -> None:
        if self._asked:
            # An answer is outstanding. A reader that must end closes its connection.
            if any(watch.ending() for watch in self._asked):
                leader, *others = self._stop_asking()
                self._wake(leader)
                with suppress(psycopg.Error):
                    leader.connection.close()
                self._waiting += others
            elif now >= self._asked[0].until + _LOST_SECONDS:
                self._fail(psycopg.OperationalError(f"no answer of the database for {_LOST_SECONDS:g} s"))
            else:
                return
        waiting = []
        for watch in self._waiting:
            if now >= watch.until or watch.ending():
                self._wake(watch)
            else:
                waiting.append(watch)
        self._waiting = []
        self._asked = waiting
        if waiting:
            self._ask(waiting)

    def _ask(self, asked: list[FleetWatch]) -> None:
        connection = asked[0].connection.pgconn
        try:
            oids = [watch.sequence for watch in asked if watch.sequence is not None]
            if len(asked) == 1 and oids:
                connection.send_query_prepared(ONE, [b"%d" % oids[0]])
            else:
                connection.send_query_prepared(MANY, [b"{%s}" % b",".join(b"%d" % oid for oid in oids)])
            if self._leader is not asked[0]:
                self._forget()
                self._socket = connection.socket
                self._selector.register(self._socket, selectors.EVENT_READ, self)
                self._leader = asked[0]
        except psycopg.Error as error:
            self._fail(error)

    def answer(self) -> None:
        """Take what has arrived."""
        if not self._asked:
            # What the server says between two questions: a notice, or that it ends.
            self._hear()
            return
        connection: PGconn = self._asked[0].connection.pgconn
        try:
            connection.consume_input()
            while not connection.is_busy():
                result = connection.get_result()
                if result is None:
                    break
                self._result = result
            else:
                return
        except psycopg.Error as error:
            self._fail(error)
            return
        last, self._result = self._result, None
        if last is None or last.status != ExecStatus.TUPLES_OK:
            self._refused(connection, last)
            return
        asked = self._asked
        snapshot = last.get_value(0, 0) or b""
        age = last.get_value(0, 2) or b""
        texts = last.get_value(0, 1) if len(asked) > 1 else None
        many = iter((texts or b"").split(b","))
        for watch in asked:
            number: bytes | None = None
            if watch.sequence is not None:
                number = next(many, None) if len(asked) > 1 else last.get_value(0, 1) or b""
            if watch.is_new(snapshot, number, age):
                self._wake(watch)
            else:
                self._waiting.append(watch)
        self._asked = []

    def _hear(self) -> None:
        leader = self._leader
        if leader is None:
            return
        try:
            leader.connection.pgconn.consume_input()
        except psycopg.Error as error:
            self._waiting.remove(leader)
            self._asked = [leader]
            self._fail(error)

    def _refused(self, connection: PGconn, result: PGresult | None) -> None:
        if connection.status == ConnStatus.BAD:
            self._fail(psycopg.OperationalError(message(result)))
            return
        # A right that was revoked: their sequences say nothing until they are looked at again.
        for watch in self._stop_asking():
            watch.sequence = None
            self._waiting.append(watch)

    def _fail(self, error: BaseException) -> None:
        """Wake the reader whose connection is lost; the others' may be intact."""
        leader, *others = self._stop_asking()
        is_lost = isinstance(error, psycopg.OperationalError)
        leader.error = error if is_lost else psycopg.OperationalError(str(error))
        self._wake(leader)
        self._waiting += others

    def _stop_asking(self) -> list[FleetWatch]:
        asked, self._asked = self._asked, []
        return asked

    def _wake(self, watch: FleetWatch) -> None:
        if watch is self._leader:
            # Before its reader may close the connection.
            self._forget()
        watch.woken.set()

    def _forget(self) -> None:
        if self._leader is not None:
            self._leader = None
            self._selector.unregister(self._socket)

    def end(self, error: BaseException) -> None:
        """Wake all with this error."""
        for watch in [*self._waiting, *self._asked]:
            watch.error = error
            watch.woken.set()
