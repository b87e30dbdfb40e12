"""One run: writers, a relay and perhaps consumers on servers of their own, faults, and what is left of it.

Invariants:
- Each relay and consumer has a way to the database of its own, a proxy; all have one way to Kafka.
- A relay of ours writes down each durable step, and dies at one where it was ordered to: that is a fault like
  any other.
- One thread does everything: starts, faults, restarts and reading. So each fault's times are true.
- A fault is over when it is healed and events flow again; one that does not end in time is recorded.
- The end: no writer lives, all that was committed has arrived and has its effect, or nothing comes any more,
  no relay and no consumer lives; then the topics are read from their beginning.
"""

from __future__ import annotations

import math
import random
import signal
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg

from outbox_pipelines.database import schema
from outbox_pipelines.settings import load_settings
from tests.conftest import drop_database
from tests.history import business, consumers, effects, questions, reader, standstill, steps, tapes, watched
from tests.history.load import SMALL, Load
from tests.history.nemesis import Kind
from tests.history.processes import Process
from tests.history.proxy import Proxy
from tests.history.record import HANDLES_REPLAYS, Exit, Fault, History
from tests.history.relays import Relay
from tests.history.replaying import Replaying
from tests.history.servers import Servers
from tests.history.steps import Mode
from tests.history.watched import Order

_WRITERS, _THREADS = 2, 3
# Events that must come before a start or a fault counts as over.
_FLOWING = 20
_RESTART_SECONDS = 0.5
# At the end, while events are missing, dead letters are replayed this often.
_REPLAY_SECONDS = 2.0


class Run:
    """A relay under test, and everything around it; `start` and `finish` it.

    Args:
        name: of the relay, for the record.
        load: how large events are, how many a backlog has, and in how large batches the relay reads them.
        consumer: whose members consume, a name in `CONSUMERS`; empty for no consumer.
        missing: a kind whose topic is not made before `create_missing`.
        asynchronous: whether the database's commits are lost in a crash, except those of sessions that say
            otherwise: the writers do.
        patience: how long events may be missing, after a fault and at the end, before that is a finding.
    """

    def __init__(
        self,
        servers: Servers,
        name: str,
        relay: Relay,
        seed: int,
        directory: Path,
        *,
        load: Load = SMALL,
        consumer: str = "",
        missing: str = "",
        asynchronous: bool = False,
        patience: float = 60.0,
    ) -> None:
        self.servers = servers
        self.history = History(name, seed, relay.delivery, consumer=consumer)
        self._relay, self.load = relay, load
        self._chance = random.Random(seed)
        self.patience = patience
        database = self._database = f"run_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(servers.postgres.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {database}".encode())
            if asynchronous:
                connection.execute(f"ALTER DATABASE {database} SET synchronous_commit = off".encode())
        self._dsn_of_users = psycopg.conninfo.make_conninfo(servers.postgres.dsn, dbname=database)
        self.dsn = psycopg.conninfo.make_conninfo(self._dsn_of_users, options="-c synchronous_commit=on")
        template = f"{database}-{{aggregate_type}}-events"
        self.settings = load_settings(
            dsn=self._dsn_of_users, kafka=servers.bootstrap_of_relays, topic=template
        )
        """As relays have them, but for their way to the database."""
        schema.migrate(self.settings)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            business.prepare(connection)
            effects.prepare(connection)
            connection.execute(relay.prepare.encode())
        self.topics = {kind: template.format(aggregate_type=kind) for kind in business.KINDS}
        reader.create(
            servers.bootstrap,
            {kind: topic for kind, topic in self.topics.items() if kind != missing},
        )
        self._missing = missing
        self._reader = reader.Reader(servers.bootstrap, self.topics, keeps=False)
        self._template, self._directory = template, directory
        self.proxies = [Proxy(servers.postgres.port) for _ in relay.programs]
        self.relays = [
            self._process(f"relay {n}", program, proxy, {**relay.environment, **load.environment})
            for n, (program, proxy) in enumerate(zip(relay.programs, self.proxies, strict=True), 1)
        ]
        members = consumers.MEMBERS if consumer else 0
        self.consumer_proxies: list[Proxy] = [Proxy(servers.postgres.port) for _ in range(members)]
        self.consumers = [
            self._process(f"consumer {n}", consumers.command(consumer), proxy, {})
            for n, proxy in enumerate(self.consumer_proxies, 1)
        ]
        write = (sys.executable, "-m", "tests.history.writers", self.dsn)
        keys = "long" if load.long_keys else "short"
        more = (str(_THREADS), load.sizes, str(load.pause_seconds), keys)
        self.writers = [
            Process(f"{database} writer {n}", (*write, str(seed + n), *more), {}, directory)
            for n in range(_WRITERS if load.writers else 0)
        ]
        self._steps_of_commands = directory / f"{database}-command.steps"
        environment = {**self._environment, "OUTBOX_DELIVERY": relay.delivery}
        self.replays = Replaying(self.dsn, f"{database} replay", environment, directory)
        self.next_orders = deque[Order]()
        """For the next lives of relays that die as ordered."""
        self.draws_orders = False
        """Whether a relay that is started is ordered to die at a durable step."""
        self._command: Process | None = None
        self._read = Counter[Process]()
        self._replay_at = 0.0
        self._starts: dict[Process, float] = {}
        self._dying: set[Process] = set()
        self._effects = 0

    @property
    def arrived(self) -> int:
        """How many events a consumer has seen by now."""
        return len(self._reader.tokens)

    def start(self) -> None:
        """Returns when events flow."""
        for relay in self.relays:
            self.start_relay(relay)
        for process in (*self.consumers, *self.writers):
            process.start()
        self._expect_events("the start")

    def start_relay(self, relay: Process, order: Order | None = None) -> None:
        """Starts it.

        Args:
            order: at which step it is to die; drawn by chance where `draws_orders` is set.
        """
        if order is None and self.draws_orders and self._relay.mode is not None:
            step, when = self._chance.choice(steps.faults(self._relay.mode))
            # Most steps are rare, and some come hundreds of times a second.
            n = 1 if self._chance.random() < 0.5 else int(math.exp(self._chance.uniform(0, math.log(300))))
            order = Order(step, when, n)
        relay.orders = order.environment if order is not None else {}
        relay.start()

    def pile_up(self, events: int) -> None:
        """Writes a backlog."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            sizes = business.SIZES[self.load.sizes]
            for _ in business.write_bulk(connection, self._chance, events, sizes):
                self.wait(0)

    def count(self, query: str) -> int:
        """A number from the database."""
        with psycopg.connect(self.dsn) as connection:
            return questions.number(connection, query)

    @contextmanager
    def without_relays(self) -> Iterator[None]:
        """Ends them in good order for the length of the block."""
        with self._recorded("no relay", disturbs=False):
            for relay in self.relays:
                self.end(relay)
            yield
            for relay in self.relays:
                self.start_relay(relay)
            self._expect_events("the start of the relays")

    def limit_topics(self, size: int | None) -> None:
        """Lets the topics take so many bytes; None: what the broker lets them."""
        made = {kind: topic for kind, topic in self.topics.items() if kind != self._missing}
        reader.limit(self.servers.bootstrap, made, size)

    def create_missing(self) -> None:
        """Makes the topic that was missing."""
        kafka = self.servers.bootstrap
        reader.create(kafka, {self._missing: self.topics[self._missing]})
        self._missing = ""
        self._reader.close()
        self._reader = reader.Reader(kafka, self.topics, keeps=False)

    @property
    def mode(self) -> Mode | None:
        """Which durable steps the relay has."""
        return self._relay.mode

    def parked(self) -> int:
        """How many events are not published because they, or others of their aggregate, were refused."""
        with psycopg.connect(self.dsn) as connection:
            return questions.parked(connection, self.mode)

    def failed(self) -> int:
        """How many of them are dead letters."""
        with psycopg.connect(self.dsn) as connection:
            return questions.failed(connection, self.mode)

    def replay(self) -> None:
        """Gives every dead letter another try, and tries now what was to be tried later."""
        self._replay_at = time.monotonic() + _REPLAY_SECONDS
        with suppress(psycopg.OperationalError), psycopg.connect(self.dsn, connect_timeout=5) as connection:
            questions.replay(connection, self.mode)

    def change_shards(self, number: int) -> None:
        """Begins to."""
        self._begin("shards", "set", str(number))

    def change_source(self, target: str) -> None:
        """Begins to."""
        self._begin("cutover", "--to", target, "--wait-seconds", "20")

    def _begin(self, *arguments: str) -> None:
        words = watched.command(*arguments)
        self._command = Process(f"{self._database} command", words, self._environment, self._directory)
        self._command.start()

    def wait_for_command(self) -> None:
        """Until it has ended; that others keep it from its aim is no finding."""
        command = self._command
        assert command is not None
        if not self.wait(self.patience, lambda: command.exit_code is not None):
            self.history.stuck.append(f"{command.name}: {command.last_words}")
        command.kill()

    def complete_replay(self) -> None:
        """Resumes it until it is done."""
        if not self.wait(self.patience, self.replays.is_complete, pace=0.2):
            self.describe_standstill("a replay does not come to its end")

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
        code = process.terminate()
        # A program that does not care for the signal ends by it.
        if code not in (0, -15) and not self._take_orders_down(process):
            self.history.exits.append(Exit(process.name, time.time(), code, process.last_words))

    def finish(self) -> History:
        """Ends everything and takes down what is to be judged."""
        for writer in self.writers:
            writer.kill()
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            # The server finishes what a killed writer has sent.
            if not self.wait(self.patience, lambda: questions.writing(connection) == 0):
                self.history.stuck.append("transactions of killed writers go on")
            business.give_up_prepared(connection)
            self.history.committed = business.committed(connection)
        everything = {event.token for event in self.history.committed}
        before = -1
        while before < self.arrived and not everything <= self._reader.tokens:
            before = self.arrived
            self.wait(self.patience, lambda: self._has_arrived(everything))
        before = -1
        while self.consumers and before < self._made() < len(everything):
            before = self._effects
            self.wait(self.patience, lambda: self._has_effects(len(everything)), pace=0.2)
        self.complete_replay()
        if self.history.consumer == HANDLES_REPLAYS:
            self._reader.read_to_end()
            due = len({(each.replay, each.token) for each in self._reader.replayed})
            if not self.wait(self.patience, lambda: self._made_of_replays() == due, pace=0.2):
                self.describe_standstill("effects of replays are missing at the end")
        if self.consumers and self._effects < len(everything):
            self.describe_standstill("effects are missing at the end")
        for process in (*self.relays, *self.consumers):
            self.end(process)
        with psycopg.connect(self.dsn) as connection:
            self.history.effects = effects.made(connection)
            self.history.replay_effects = effects.of_replays(connection)
            self.history.unhandled = effects.unhandled(connection)
            self.history.figures.update(questions.figures(connection))
        tapes.collect(self.history, (*self.relays, *self.consumers))
        self.history.replays = self.replays.recorded()
        self.history.messages, self.history.replayed = reader.read(self.servers.bootstrap, self.topics)
        return self.history

    def close(self) -> None:
        """Ends whatever still runs."""
        self.draws_orders = False
        self.replays.kill()
        for process in (*self.writers, *self.relays, *self.consumers, *filter(None, [self._command])):
            process.kill()
        for proxy in (*self.proxies, *self.consumer_proxies):
            proxy.close()
        self._reader.close()

    def remove(self) -> None:
        """Deletes database and topics: a long soak has many rounds."""
        reader.remove(self.servers.bootstrap, self.topics)
        with psycopg.connect(self.servers.postgres.dsn, autocommit=True) as connection:
            drop_database(connection, self._database)

    def describe_standstill(self, words: str) -> Path:
        """Records that nothing flows, and what programs and servers do then; returns where that stands."""
        self.history.stuck.append(words)
        log = self._directory / f"{self._database}-standstill.log"
        standstill.describe(self.dsn, self.servers.bootstrap, self._database, log)
        for process in (*self.relays, *self.consumers):
            process.dump_stacks()
        return log

    def replay_again(self) -> None:
        """Replays, but not all the time."""
        if time.monotonic() > self._replay_at:
            self.replay()

    def _has_arrived(self, everything: set[str]) -> bool:
        if everything <= self._reader.tokens:
            return True
        # An honest event at which relays crashed three times is a dead letter, and blocks those behind it.
        self.replay_again()
        return False

    def _has_effects(self, events: int) -> bool:
        if self._made() == events:
            return True
        if time.monotonic() > self._replay_at:
            self._replay_at = time.monotonic() + _REPLAY_SECONDS
            with (
                suppress(psycopg.OperationalError),
                psycopg.connect(self.dsn, connect_timeout=5) as connection,
            ):
                effects.hurry(connection)
        return False

    def steps_of(self, process: Process) -> list[str]:
        """The durable steps of a relay in all its lives; faults begin with "!"."""
        path = process.log.with_suffix(".steps")
        return path.read_text().splitlines() if path.exists() else []

    def steps_of_commands(self) -> list[str]:
        """The same of operators' commands."""
        path = self._steps_of_commands
        return path.read_text().splitlines() if path.exists() else []

    def _take_orders_down(self, process: Process) -> bool:
        """Takes down what was done at this relay's steps; whether it dies of that."""
        path = process.log.with_suffix(".steps")
        if not path.exists() or path.stat().st_size == self._read[process]:
            return False
        with path.open() as file:
            file.seek(self._read[process])
            new = file.read()
        self._read[process] += len(new.encode())
        done = [line.removeprefix("! ") for line in new.splitlines() if line.startswith("! ")]
        for name in done:
            self.history.steps[name] = self.history.steps.get(name, 0) + 1
            at = min(path.stat().st_mtime, time.time())
            self.history.faults.append(Fault(f"relay at a step: {name}", at, time.time(), disturbs=True))
        return any(name.startswith(("before ", "after ")) for name in done)

    def _tend(self) -> None:
        """Record which programs have ended on their own, and start them again."""
        for relay in self.relays:
            if self._take_orders_down(relay):
                self._dying.add(relay)
            # What a relay writes down comes shortly before it dies.
            if relay in self._dying and relay.exit_code == -signal.SIGKILL:
                self._dying.remove(relay)
                self.start_relay(relay, self.next_orders.popleft() if self.next_orders else None)
        for process in (*self.relays, *self.consumers, *self.writers):
            code = process.exit_code
            if code is None:
                # It runs, or it was ended on purpose.
                self._starts.pop(process, None)
            elif process not in self._starts:
                self.history.exits.append(Exit(process.name, time.time(), code, process.last_words))
                self._starts[process] = time.monotonic() + _RESTART_SECONDS
            elif time.monotonic() > self._starts[process]:
                if process not in self.relays:
                    process.start()
                elif self._relay.restarts or self._relay.mode is not None:
                    self.start_relay(process)
                else:
                    continue
                del self._starts[process]

    def _expect_events(self, after: str) -> None:
        goal = self.arrived + _FLOWING
        if not self.wait(self.patience, lambda: self.arrived >= goal):
            self.describe_standstill(f"no events for {self.patience:.0f} s after {after}")
        goal = self._made() + _FLOWING
        if self.consumers and not self.wait(self.patience, lambda: self._made() >= goal, pace=0.2):
            self.describe_standstill(f"no effects for {self.patience:.0f} s after {after}")

    def _made(self) -> int:
        """How many events have had an effect by now, as far as is known."""
        if self.consumers:
            with suppress(psycopg.OperationalError), psycopg.connect(self.dsn) as connection:
                self._effects = effects.count(connection)
        return self._effects

    def _made_of_replays(self) -> int:
        """How many replayed events have had an effect."""
        with psycopg.connect(self.dsn) as connection:
            return len(effects.of_replays(connection))

    def _process(self, name: str, program: tuple[str, ...], proxy: Proxy, more: Mapping[str, str]) -> Process:
        environment = {
            "OUTBOX_DSN": psycopg.conninfo.make_conninfo(self._dsn_of_users, port=proxy.port),
            "OUTBOX_KAFKA": self.servers.bootstrap_of_relays,
            "OUTBOX_TOPIC": self._template,
            "HISTORY_STEPS": str(self._directory / f"{self._database}-{name.replace(' ', '-')}.steps"),
            **more,
        }
        return Process(f"{self._database} {name}", program, environment, self._directory)

    @property
    def _environment(self) -> dict[str, str]:
        """Of an operator's commands, which go straight to the servers."""
        return {
            "OUTBOX_DSN": self._dsn_of_users,
            "OUTBOX_KAFKA": self.servers.bootstrap,
            "OUTBOX_TOPIC": self._template,
            "HISTORY_STEPS": str(self._steps_of_commands),
        }

    @contextmanager
    def _recorded(self, name: str, disturbs: bool) -> Iterator[None]:
        started = time.time()
        try:
            yield
        finally:
            self.history.faults.append(Fault(name, started, time.time(), disturbs))
