"""One run: writers, a relay and perhaps consumers on servers of their own, faults, and what is left of it.

Invariants:
- Each relay and consumer has a way to the database of its own, a proxy; all have one way to Kafka.
- One thread does everything: starts, faults, restarts and reading. So each fault's times are true.
- A fault is over when it is healed and events flow again; one that does not end in time is recorded.
- The end: no writer lives, all that was committed has arrived and has its effect, or nothing comes any more,
  no relay and no consumer lives; then the topics are read from their beginning.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from outbox_pipelines import schema
from outbox_pipelines.settings import load_settings
from tests.history import business, consumers, effects, reader
from tests.history.nemesis import Kind
from tests.history.processes import Process
from tests.history.proxy import Proxy
from tests.history.record import Exit, Fault, History
from tests.history.relays import Relay
from tests.history.servers import Servers
from tests.history.writers import APPLICATION

_WRITERS, _THREADS = 2, 3
# Events that must come before a start or a fault counts as over.
_FLOWING = 20
_RESTART_SECONDS = 0.5


class Run:
    """A relay under test, and everything around it; `start` and `finish` it.

    Args:
        name: of the relay, for the record.
        consumer: whose members consume, a name in `CONSUMERS`; nobody where it is empty.
        patience: how long events may stay away, after a fault and at the end, before that is a finding.
    """

    def __init__(
        self,
        servers: Servers,
        name: str,
        relay: Relay,
        seed: int,
        directory: Path,
        *,
        consumer: str = "",
        patience: float = 60.0,
    ) -> None:
        self.servers = servers
        self.history = History(name, seed, relay.delivery, consumer=consumer)
        self._relay = relay
        self._patience = patience
        database = f"run_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(servers.postgres.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {database}".encode())
        self.dsn = psycopg.conninfo.make_conninfo(servers.postgres.dsn, dbname=database)
        template = f"{database}-{{aggregate_type}}-events"
        schema.migrate(load_settings(dsn=self.dsn, kafka=servers.kafka.bootstrap, topic=template))
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            business.prepare(connection)
            effects.prepare(connection)
            connection.execute(relay.prepare.encode())
        self.topics = {kind: template.format(aggregate_type=kind) for kind in business.KINDS}
        reader.create(servers.kafka.bootstrap, self.topics)
        self._reader = reader.Reader(servers.kafka.bootstrap, self.topics)
        self._template, self._directory = template, directory
        self.proxies = [Proxy(servers.postgres.port) for _ in relay.programs]
        self.relays = [
            self._process(f"relay {n}", program, proxy, relay.environment)
            for n, (program, proxy) in enumerate(zip(relay.programs, self.proxies, strict=True), 1)
        ]
        members = consumers.MEMBERS if consumer else 0
        self.consumer_proxies = [Proxy(servers.postgres.port) for _ in range(members)]
        self.consumers = [
            self._process(f"consumer {n}", consumers.command(consumer), proxy, {})
            for n, proxy in enumerate(self.consumer_proxies, 1)
        ]
        write = (sys.executable, "-m", "tests.history.writers", self.dsn)
        self.writers = [
            Process(
                f"{database} writer {n}", (*write, str(seed + n), str(_THREADS), "two-phases"), {}, directory
            )
            for n in range(_WRITERS)
        ]
        self._starts: dict[Process, float] = {}
        self._effects = 0

    @property
    def arrived(self) -> int:
        """How many events a consumer has seen by now."""
        return len(self._reader.tokens)

    def start(self) -> None:
        """Returns when events flow."""
        for process in (*self.relays, *self.consumers, *self.writers):
            process.start()
        self._expect_events("the start")

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False, *, pace: float = 0.05) -> bool:
        """Goes on with everything for so long, or until a condition holds; whether it does.

        Args:
            pace: how often the condition is looked at.
        """
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            self._reader.poll(pace)
            self._tend()
        return True

    def disturb(self, kinds: Mapping[str, Kind], chance: random.Random, seconds: float) -> None:
        """Faults at the same time, for so long; then heals them and waits for events to flow."""
        name = " + ".join(kinds)
        with self._recorded(name, any(kind.disturbs for kind in kinds.values())):
            with ExitStack() as faults:
                for kind in kinds.values():
                    faults.enter_context(kind.fault(self, chance))
                self.wait(seconds)
            self._expect_events(name)

    def end(self, process: Process) -> None:
        """Asks a relay or consumer to end, and takes down if it did not do so in peace."""
        self._tend()
        if process.exit_code is not None:
            return
        words, code = process.last_words, process.terminate()
        # A program that does not care for the signal ends by it.
        if code not in (0, -15):
            self.history.exits.append(Exit(process.name, time.time(), code, words))

    def finish(self) -> History:
        """Ends everything and takes down what is to be judged."""
        for writer in self.writers:
            writer.kill()
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            # The server finishes what a killed writer has sent.
            if not self.wait(self._patience, lambda: _writing(connection) == 0):
                self.history.stuck.append("transactions of killed writers go on")
            business.give_up_prepared(connection)
            self.history.committed = business.committed(connection)
        everything = {event.token for event in self.history.committed}
        before = -1
        while before < self.arrived and not everything <= self._reader.tokens:
            before = self.arrived
            self.wait(self._patience, lambda: everything <= self._reader.tokens)
        before = -1
        while self.consumers and before < self._made() < len(everything):
            before = self._effects
            self.wait(self._patience, lambda: self._made() == len(everything), pace=0.2)
        for process in (*self.relays, *self.consumers):
            self.end(process)
        with psycopg.connect(self.dsn) as connection:
            self.history.effects = effects.made(connection)
        self.history.messages = reader.read(self.servers.kafka.bootstrap, self.topics)
        return self.history

    def close(self) -> None:
        """Ends whatever still runs."""
        for process in (*self.writers, *self.relays, *self.consumers):
            process.kill()
        for proxy in (*self.proxies, *self.consumer_proxies):
            proxy.close()
        self._reader.close()

    def _tend(self) -> None:
        """Takes down which programs have ended by themselves, and starts them again."""
        for process in (*self.relays, *self.consumers, *self.writers):
            code = process.exit_code
            if code is None:
                # It runs, or it was ended on purpose.
                self._starts.pop(process, None)
            elif process not in self._starts:
                self.history.exits.append(Exit(process.name, time.time(), code, process.last_words))
                self._starts[process] = time.monotonic() + _RESTART_SECONDS
            elif time.monotonic() > self._starts[process] and (
                self._relay.restarts or process not in self.relays
            ):
                process.start()
                del self._starts[process]

    def _expect_events(self, after: str) -> None:
        goal = self.arrived + _FLOWING
        if not self.wait(self._patience, lambda: self.arrived >= goal):
            self.history.stuck.append(f"no events for {self._patience:.0f} s after {after}")
        goal = self._made() + _FLOWING
        if self.consumers and not self.wait(self._patience, lambda: self._made() >= goal, pace=0.2):
            self.history.stuck.append(f"no effects for {self._patience:.0f} s after {after}")

    def _made(self) -> int:
        """How many events have had an effect by now, as far as is known."""
        if self.consumers:
            with suppress(psycopg.OperationalError), psycopg.connect(self.dsn) as connection:
                self._effects = effects.count(connection)
        return self._effects

    def _process(self, name: str, program: tuple[str, ...], proxy: Proxy, more: Mapping[str, str]) -> Process:
        environment = {
            "OUTBOX_DSN": psycopg.conninfo.make_conninfo(self.dsn, port=proxy.port),
            "OUTBOX_KAFKA": f"127.0.0.1:{self.servers.kafka_proxy.port}",
            "OUTBOX_TOPIC": self._template,
            **more,
        }
        database = psycopg.conninfo.conninfo_to_dict(self.dsn)["dbname"]
        return Process(f"{database} {name}", program, environment, self._directory)

    @contextmanager
    def _recorded(self, name: str, disturbs: bool) -> Iterator[None]:
        started = time.time()
        try:
            yield
        finally:
            self.history.faults.append(Fault(name, started, time.time(), disturbs))


def _writing(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s",
        [APPLICATION],
    ).fetchone()
    assert row is not None
    return int(row[0])
