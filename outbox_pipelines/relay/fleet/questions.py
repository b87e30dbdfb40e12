"""The questions of a fleet to one database: whether there may be events for the readers that wait.

Invariants:
- Nothing here waits for an answer: a database that does not answer delays its own outboxes only.
- Outboxes that are schemas of one database are asked about by one of their connections.
"""

from __future__ import annotations

import random
import selectors
from contextlib import suppress

import psycopg
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from outbox_pipelines.relay.fleet.watch import BUSY, IDLE, MANY, ONE, FleetWatch, message


class Database:
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
        """Wake who must not wait longer, and ask for the others; say when to do so again."""
        self._ask_again(now)
        watches = self._waiting or self._asked
        every = min([watch.every(now) for watch in watches], default=BUSY)
        self.is_busy = every < IDLE and bool(watches)
        # From when it was due: what is late once would come together with others from then on.
        self.due = self.due + every if self.due + every > now else now + every * random.random()

    def _ask_again(self, now: float) -> None:
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
        asked = self._stop_asking()
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
