"""One thread that waits for new events on behalf of all readers of a process.

Invariants:
- A reader lends its own connection, which sees the lock of its shard, and does not use it until it is woken.
  Outboxes that are schemas of one database are asked about by one of their connections.
- A database that does not answer delays its own outboxes only: nothing here waits for an answer.
- Every reader is woken after `LONGEST` seconds and looks into its table, whatever its sequence says.
- If this thread fails, every reader is woken with the failure.
"""

from __future__ import annotations

import random
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final

import psycopg
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from outbox_pipelines.database import Connection
from outbox_pipelines.fleet import queries
from outbox_pipelines.fleet.quiet import Quiet
from outbox_pipelines.position import Snapshot

EVERY: Final = 0.04
LONGEST: Final = 2.0
# How often a reader looks whether its sequence can still be trusted: a person may change it.
_SEQUENCE_SECONDS: Final = 60.0
_ONE: Final = b"outbox_watch_one"
_MANY: Final = b"outbox_watch_many"


class FleetWatch:
    """What the reader of one outbox waits with: implements `relay.host.Watch`.

    Args:
        database: equal for connections whose sessions see the same sequences.
        ending: whether the reader must end.
    """

    def __init__(
        self, watcher: Watcher, connection: Connection, database: Hashable, ending: Callable[[], bool]
    ) -> None:
        self.connection = connection
        self.database = database
        self.ending = ending
        self.quiet = Quiet()
        self.sequence: int | None = None
        self.until = 0.0
        self.error: BaseException | None = None
        self.woken = threading.Event()
        self._watcher = watcher
        self._sequence_until = 0.0
        for name, query in ((_ONE, queries.WATCH_ONE), (_MANY, queries.WATCH_MANY)):
            result = connection.pgconn.prepare(name, query)
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.OperationalError(_message(result))

    def wait(self, done: Snapshot, seconds: float) -> None:
        """Return when there may be something that `done` does not see, or when the reader must end."""
        now = time.monotonic()
        if now >= self._sequence_until:
            row = self.connection.execute(queries.SEQUENCE).fetchone()
            self.sequence = None if row is None else row[0]
            self._sequence_until = now + _SEQUENCE_SECONDS * random.uniform(0.8, 1.2)
        self.quiet.has_read(done)
        self.until = now + LONGEST * random.uniform(0.8, 1.0)
        self.woken.clear()
        self._watcher.lend(self)
        self.woken.wait()
        if self.error is not None:
            raise self.error


class _Database:
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

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._asked)

    def add(self, watch: FleetWatch) -> None:
        self._waiting.append(watch)

    def turn(self, now: float) -> None:
        """Wake who must not wait longer, and ask for the others."""
        if self._asked:
            # The server owes an answer. A reader that must end closes its connection.
            if any(watch.ending() for watch in self._asked):
                leader, *others = self._stop_asking()
                self._wake(leader)
                with suppress(psycopg.Error):
                    leader.connection.close()
                self._waiting += others
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
                connection.send_query_prepared(_ONE, [b"%d" % oids[0]])
            else:
                connection.send_query_prepared(_MANY, [b"{%s}" % b",".join(b"%d" % oid for oid in oids)])
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
        asked = self._stop_asking()
        snapshot = last.get_value(0, 0) or b""
        age = last.get_value(0, 2) or b""
        texts = last.get_value(0, 1) if len(asked) > 1 else None
        many = iter((texts or b"").split(b","))
        for watch in asked:
            number: bytes | None = None
            if watch.sequence is not None:
                number = next(many, None) if len(asked) > 1 else last.get_value(0, 1) or b""
            if watch.quiet.is_new(snapshot, number, age):
                self._wake(watch)
            else:
                self._waiting.append(watch)

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
            self._fail(psycopg.OperationalError(_message(result)))
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


class Watcher:
    """The thread; a context in which it runs."""

    def __init__(self) -> None:
        self._lent: deque[FleetWatch] = deque()
        self._databases: dict[Hashable, _Database] = {}
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
        until = now + EVERY
        while self._lent:
            watch = self._lent.popleft()
            if watch.database not in self._databases:
                self._databases[watch.database] = _Database(self._selector)
            self._databases[watch.database].add(watch)
        for key in [key for key, database in self._databases.items() if database.is_idle]:
            del self._databases[key]
        for database in self._databases.values():
            database.turn(now)
        while (left := until - time.monotonic()) > 0:
            for found, _ in self._selector.select(left):
                found.data.answer()


def _message(result: PGresult | None) -> str:
    text = b"" if result is None else result.error_message
    return text.decode(errors="replace").strip() or "the server closed the connection"
