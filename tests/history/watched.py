"""A relay, or a command, whose durable steps are written down, and which dies at one of them.

As a program: ``python -m tests.history.watched relay|hand-over|command WORDS…``. In the environment:

- ``HISTORY_STEPS``: the file to which each step is appended when it is done; faults begin with "!".
- ``HISTORY_FAULT``: an `Order` as JSON: where to die, or to lose an answer, or to stop Kafka.

Invariants:
- It wraps the driver and Kafka's client from outside; the relay's code is the one that users run.
- A crash is SIGKILL to itself: nothing is given back, flushed or closed.
- An answer is lost after the work was done: the database's connection is gone then, and Kafka's client says
  once that time is up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import psycopg
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay import relay_sql
from tests.history import standstill, steps, tapes
from tests.model.relay.recorder import Recorder

T = TypeVar("T")
_WRITES = ("INSERT", "UPDATE", "DELETE", "MERGE", "CREATE", "ALTER", "DROP", "TRUNCATE")
# Longer than anything between the two ends of a hold.
_HOLD_SECONDS = 0.5
_IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class Order:
    """What is to happen at the n-th time that a step is reached."""

    step: str
    when: str
    """A `steps.When`, or "stall": Kafka is stopped right before it; or "hold": until shortly after it the
    session of the shard waits before a statement."""
    n: int = 1
    released: bool = False
    """Only commits whose record names released events count."""
    then: str = ""
    """Another step: what is to happen, happens before or after the first of that name from then on."""
    process: int = 0
    seconds: float = 0.0
    """A stall: whose process, for how long."""

    @property
    def environment(self) -> dict[str, str]:
        return {"HISTORY_FAULT": json.dumps(asdict(self))}

    def __str__(self) -> str:
        return f"{self.when} {self.step}"


class Watch:
    """Counts the steps of this process, and does what was ordered."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._file = os.open(environment["HISTORY_STEPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        given = environment.get("HISTORY_FAULT")
        self._order = Order(**json.loads(given)) if given else None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._armed = self._order is not None
        self._holds = threading.Event()
        self._holds.set()
        self._is_held = threading.Event()
        self.has_released = False
        """Whether the record that was handed over last names released events."""

    def through(self, names: list[str], work: Callable[[], T], lose: Callable[[], T] | None = None) -> T:
        """Does the work, which is these steps.

        Args:
            lose: called when the answer is to be lost; raises, or returns what the caller sees instead.
        """
        lost = [self._reach(name) for name in names]
        result = work()
        for name in names:
            self._passed(name)
        if any(lost) and lose is not None:
            return lose()
        return result

    def before_statement(self, is_of_shard: bool) -> None:
        """Waits while the session of the shard is held."""
        if is_of_shard and not self._holds.is_set():
            self._is_held.set()
            self._holds.wait()

    def _reach(self, name: str) -> bool:
        """Right before a step; whether its answer is to be lost."""
        order = self._order
        with self._lock:
            self._counts[name] += 1
            if order is None or not self._armed or name != order.step:
                return False
            if order.released and not self.has_released:
                return False
            if order.when in ("after", "hold") or self._counts[name] < order.n:
                return False
            self._armed = False
        self._say(f"! {order}")
        if order.when == "before":
            _die()
        if order.when == "stall":
            _stall(order.process, order.seconds)
        return order.when == "lost"

    def loses(self, name: str) -> bool:
        """Whether the answer of a step of this name is to be lost."""
        return (
            self._order is not None and self._armed and (self._order.when, self._order.step) == ("lost", name)
        )

    def _passed(self, name: str) -> None:
        if name not in ("acknowledge", "acknowledge a probe") or self._counts[name] == 1:
            self._say(name)
        order = self._order
        if order is None or not self._armed or name != order.step or order.when != "after":
            return
        if self._counts[name] >= order.n:
            self._say(f"! {order}")
            _die()

    def hold(self, name: str) -> Callable[[], None] | None:
        """Before a step: stops the session of the shard, where that is ordered; returns what ends it.

        So what the step brings about, and what follows soon after, reach the session at once.
        """
        order = self._order
        if order is None or not self._armed or order.when != "hold" or name != order.step:
            return None
        if order.released and not self.has_released:
            return None
        self._armed = False
        self._holds.clear()
        self._is_held.wait(_IDLE_SECONDS)

        def end() -> None:
            self._say(f"! {order}")
            self._order, self._armed = Order(order.then, "after"), True
            self._counts.clear()
            timer = threading.Timer(_HOLD_SECONDS, self._holds.set)
            timer.daemon = True
            timer.start()

        return end

    def _say(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _stall(process: int, seconds: float) -> None:
    os.kill(process, signal.SIGSTOP)
    timer = threading.Timer(seconds, os.kill, (process, signal.SIGCONT))
    timer.daemon = True
    timer.start()


def watch_database(watch: Watch) -> None:
    """Makes every statement and every commit of psycopg pass by the watch."""
    templates: dict[str, str] = {}
    pending: dict[int, list[str]] = {}
    shard_sessions: set[int] = set()
    execute, leave = psycopg.Cursor.execute, psycopg.Transaction.__exit__
    make = Statements.__call__

    def lose(connection: psycopg.Connection[Any]) -> Any:
        connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly (its answer is lost)")

    def made(self: Any, statement: Any, *conditions: Any) -> bytes:
        text = make(self, statement, *conditions)
        templates[text.decode()] = statement
        return text

    def executed(self: Any, query: Any, params: Any = None, **more: Any) -> Any:
        connection = self.connection
        text = _text(query)
        statement = templates.get(text, text)
        name = steps.name_of(statement, params or {})
        watch.before_statement(id(connection) in shard_sessions)
        if statement == relay_sql.TAKE:
            shard_sessions.add(id(connection))

        def work() -> Any:
            return execute(self, query, params, **more)

        if text == "COMMIT":
            names = steps.of_transaction(pending.pop(id(connection), []))
            return watch.through(names, work, lambda: lose(connection))
        if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            pending.pop(id(connection), None)
            if name is not None:
                return watch.through([name], work, lambda: lose(connection))
        result = work()
        if self.rowcount > 0:
            writes = (self.statusmessage or "").startswith(_WRITES)
            if name is None and writes and not steps.is_quiet(statement):
                name = f"unknown: {' '.join(statement.split())[:80]}"
            if name is not None and connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
                watch.through([name], lambda: None)
            elif name is not None:
                pending.setdefault(id(connection), []).append(name)
        return result

    def left(
        self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        connection = self.connection
        names = pending.pop(id(connection), [])

        def work() -> Any:
            return leave(self, kind, error, trace)

        if kind is not None:
            return work()
        return watch.through(steps.of_transaction(names), work, lambda: lose(connection))

    psycopg.Cursor.execute = executed  # type: ignore[method-assign]
    psycopg.Transaction.__exit__ = left  # type: ignore[method-assign]
    Statements.__call__ = made  # type: ignore[method-assign]


def _text(query: Any) -> str:
    if isinstance(query, bytes):
        return query.decode()
    return query if isinstance(query, str) else str(query.as_string(None))


def watch_kafka(watch: Watch) -> None:
    """Makes the relay's producers and its progress topic pass by the watch."""
    from outbox_pipelines.relay.kafka import client, progress_topic

    class Watched(Producer):
        """One that says what it does; the prober's goes by other names."""

        def __init__(self, config: dict[str, Any], **more: Any) -> None:
            super().__init__(config, **more)
            self._probes = config.get("batch.num.messages") == 1
            self._is_transactional = "transactional.id" in config
            self._is_copy = False
            self._has_committed = False

        def init_transactions(self, *given: Any) -> Any:
            names = [] if self._probes else ["fence predecessors"]
            return watch.through(names, lambda: super(Watched, self).init_transactions(*given), _time_is_up)

        def produce(  # type: ignore[override]
            self, topic: str, value: Any = None, key: Any = None, **more: Any
        ) -> None:
            report = more.get("on_delivery")
            if report is None:
                with suppress(ValueError, TypeError):
                    watch.has_released = bool(json.loads(value).get("released"))
            else:
                name = "acknowledge a probe" if self._probes else "acknowledge"
                if topic.endswith(".dlq"):
                    name = "copy a dead letter"
                # In a transaction a probe is invisible before its abort, and a copy before its commit.
                names = [] if self._is_transactional and self._probes else [name]
                more["on_delivery"] = _reported(watch, names, report)
            self._is_copy = topic.endswith(".dlq")
            super().produce(topic, value, key, **more)

        def commit_transaction(self, *given: Any) -> Any:
            if self._has_committed:
                # It was done the first time, when the answer was lost.
                self._has_committed = False
                return None
            names = ["copy a dead letter" if self._is_copy else "commit"]
            end = watch.hold(names[0])
            if watch.loses(names[0]):
                # An answer is lost once it was given, however long that took.
                given = (_IDLE_SECONDS,)

            def lose() -> None:
                self._has_committed = True
                _time_is_up()

            result = watch.through(names, lambda: super(Watched, self).commit_transaction(*given), lose)
            if end is not None:
                end()
            return result

        def abort_transaction(self, *given: Any) -> Any:
            names = ["abort a probe" if self._probes else "abort"]
            return watch.through(names, lambda: super(Watched, self).abort_transaction(*given), _time_is_up)

    class Admin(AdminClient):
        """Makes the progress topic."""

        def create_topics(self, *given: Any, **more: Any) -> Any:
            return watch.through(
                ["create the progress topic"], lambda: super(Admin, self).create_topics(*given, **more)
            )

    client.Producer = Watched  # type: ignore[attr-defined,assignment]
    progress_topic.AdminClient = Admin  # type: ignore[attr-defined]


def _reported(watch: Watch, names: list[str], report: Callable[..., None]) -> Callable[..., None]:
    def reported(error: KafkaError | None, message: Any) -> None:
        watch.through(names if error is None else [], lambda: report(error, message))

    return reported


def _time_is_up() -> Any:
    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the answer is lost", retriable=True))


def command(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", "tests.history.watched", *words


def main(words: list[str]) -> None:
    watch = Watch(os.environ)
    watch_database(watch)
    watch_kafka(watch)
    recorder = Recorder(limit=tapes.SAMPLE)
    if words[0] == "hand-over":
        _hand_over(float(words[1]), recorder)
    else:
        from outbox_pipelines.cli.main import cli

        with tapes.sampled(recorder, Path(os.environ["HISTORY_STEPS"])):
            cli(words, prog_name="outbox")


def _hand_over(seconds: float, recorder: Recorder) -> None:
    """Relays as Dagster's sessions do: after so long the shard goes to a successor."""
    from outbox_pipelines.core.signals import set_from_handler
    from outbox_pipelines.errors import UnavailableError
    from outbox_pipelines.relay import service
    from outbox_pipelines.settings import load_settings

    stops = [threading.Event()]
    ends: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        ends.append(number)
        set_from_handler(stops[-1])

    signal.signal(signal.SIGTERM, on_signal)
    while not ends:
        # A session that hands over sets its own.
        stops.append(threading.Event())
        if ends:
            return
        try:
            with tapes.sampled(recorder, Path(os.environ["HISTORY_STEPS"])):
                service.relay(load_settings(), stop=stops[-1], hand_over_after=seconds)
        except (UnavailableError, psycopg.OperationalError) as error:
            # The next session comes, as it does in Dagster.
            print(error, file=sys.stderr)
            stops[-1].wait(0.5)


if __name__ == "__main__":
    standstill.listen()
    main(sys.argv[1:])
