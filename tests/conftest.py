"""What every test stands on: a real PostgreSQL and a real Kafka, and a fresh outbox for each test.

Invariants:
- The servers are the local stack's, shared by every run on the machine; each test has its own database and
  topics, and a run removes its own topics alone, if the stack outlives it.
- Files lie in memory where there is enough of it (see `memory`).
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, NamedTuple, cast

import psycopg
import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from confluent_kafka import Message as KafkaMessage
from psycopg import sql

from outbox_pipelines.core import secret
from outbox_pipelines.database import schema
from outbox_pipelines.local import Stack
from outbox_pipelines.local import stack as local_stack
from outbox_pipelines.local.kafka import answers, record_startup
from outbox_pipelines.local.server import Server
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.writer import emit
from tests import forks, in_process, kafka_clients, memory, order, workers
from tests.kafka_clients import Consumer, administrator

# What --fast leaves out: tests with fixtures that start servers or fill archives, and folders that do.
_SLOW_FIXTURES: Final = {
    *("stack", "lasting", "own_servers", "own_table", "servers", "strict", "server"),
    *("flights_archive", "storage", "of"),
}
_SLOW_FOLDERS: Final = {"browser", "demo", "history", "interop", "local", "model"}


def either(first: Any, *others: Any) -> list[Any]:
    """Return the values of a parameter, of which `make test` runs the first; a tuple is for several names."""
    more = [each if isinstance(each, tuple) else (each,) for each in others]
    return [first, *(pytest.param(*each, marks=pytest.mark.extended) for each in more)]


EITHER_DELIVERY: Final = either("exactly_once", "at_least_once")
"""For a test of what both deliveries have."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only the tests that start no server")
    parser.addoption("--short", action="store_true", help="as `make test`: no extended tests, short sweeps")
    parser.addoption(
        "--thorough", action="store_true", help="as many repeats and cases as `make thorough` runs"
    )


@pytest.fixture(scope="session")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """Whether a test repeats what it does as often as in `make thorough`."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def is_short(request: pytest.FixtureRequest) -> bool:
    """Whether a test repeats as little as in `make test`."""
    return bool(request.config.getoption("--short"))


@pytest.fixture(scope="session")
def stride(is_short: bool, is_thorough: bool) -> int:
    """Return at every how many statements a sweep kills: at one alone in `make test`."""
    return 1_000 if is_short else 1 if is_thorough else 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look seldom for garbage among what is imported. A relay that starts would count all that is frozen."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(20_000, 50, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_fast = config.getoption("--fast", False)
    is_short = config.getoption("--short", False)
    is_thorough = config.getoption("--thorough", False)
    left_out = [
        item
        for item in items
        if (is_fast and _is_slow(item))
        or (is_short and item.get_closest_marker("extended"))
        or (not is_thorough and _is_extra(item))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]
    if (ours := getattr(config, "workerinput", None)) is not None:
        items[:] = order.deal(items, ours["workercount"], with_servers=1 if is_short else 2)


def _is_extra(item: pytest.Item) -> bool:
    return any(marker.kwargs.get("only") for marker in item.iter_markers("thorough"))


def _is_slow(item: pytest.Item) -> bool:
    return bool(
        item.get_closest_marker("slow")
        or _SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        or _SLOW_FOLDERS.intersection(item.path.parts)
    )


def _refuse_server(*_: object) -> None:
    pytest.fail("this test starts a server: mark it as slow, so that --fast leaves it out")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # In every run: --fast is none of CI's.
    with pytest.MonkeyPatch.context() as patch:
        if not _is_slow(item):
            patch.setattr(Server, "_spawn", _refuse_server)
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    # With several workers, pytest would only say that no tests ran.
    for argument in config.args:
        if not (config.invocation_params.dir / argument.partition("::")[0]).exists():
            raise pytest.UsageError(f"{argument} does not exist: name a file or folder of tests")
    # Ignored in the background of a shell. Dagster gives SIGTERM what SIGINT has, and programs inherit what
    # is ignored: no program that is started later would end on it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A worker inherits what the process that starts it has set.
    if not hasattr(config, "workerinput"):
        ends = ExitStack()
        config.add_cleanup(ends.close)
        has_workers = bool(config.getoption("numprocesses", None))
        ends.enter_context(memory.directories(workers=has_workers))
        if has_workers and workers.can_be_forked():
            ends.enter_context(workers.forked(config.invocation_params.args))


# After pytest's own, which writes where it is not found.
@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if (given := getattr(session.config, "workerinput", None)) is not None:
        workers.note_crashes(given)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # At its end pytest looks twice for garbage among all that is imported, which copies what workers share.
    if hasattr(session.config, "workerinput"):
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    report.longrepr = f"{report.longrepr}: {workers.crash(report.node)}"


class Message(NamedTuple):
    """What a consumer saw."""

    topic: str
    partition: int
    offset: int
    key: str
    value: str | None
    headers: dict[str, str | None]


@dataclass(frozen=True)
class Outbox:
    """One test's outbox: a migrated database and a topic template of its own."""

    settings: Settings

    @property
    def environment(self) -> dict[str, str]:
        """For subprocesses."""
        return {
            "OUTBOX_DSN": self.settings.dsn,
            "OUTBOX_KAFKA": self.settings.kafka,
            "OUTBOX_TOPIC": self.settings.topic,
            "OUTBOX_LEASE_SECONDS": str(self.settings.lease_seconds),
        }

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        return psycopg.connect(self.settings.dsn, autocommit=autocommit)

    def topic(self, aggregate_type: str = "order") -> str:
        return self.settings.topic.format(aggregate_type=aggregate_type)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query answers."""
        return session(self.settings.dsn).execute(query.encode()).fetchall()

    def write(self, *aggregate_ids: object, event_type: str = "order.placed") -> list[int]:
        """One committed transaction with an event for each aggregate; their seqs."""
        connection = session(self.settings.dsn)
        with connection.transaction():
            return [
                emit(connection, "order", aggregate_id, event_type, {"n": n}).seq or 0
                for n, aggregate_id in enumerate(aggregate_ids)
            ]

    def fill(self, events: int, aggregates: int = 100) -> None:
        """Many committed events in one statement; payload {"n": 1 …}."""
        session(self.settings.dsn).execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', (i %% %s)::text, 'order.placed', jsonb_build_object('n', i) "
            "FROM generate_series(1, %s) i",
            [aggregates, events],
        )

    def messages(self, aggregate_type: str = "order") -> list[Message]:
        """Everything in a topic, each partition in order."""
        return read_topic(self.settings.kafka, self.topic(aggregate_type))

    def outbox(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the command `outbox` to its end, in this process."""
        return in_process.run(arguments, clean_environment() | self.environment | environment)

    def process(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs it in a process of its own, where that makes a difference; ended after ten minutes."""
        return forks.run(
            command(*arguments),
            env=clean_environment() | self.environment | environment,
            capture_output=True,
            text=True,
            timeout=600,
        )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outbox_pipelines", *arguments]


def clean_environment() -> dict[str, str]:
    """This process's environment without any setting of ours."""
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}


def read_topic(kafka: str, topic: str) -> list[Message]:
    """Everything in a topic, each partition in order; nothing where there is no such topic."""
    with kafka_clients.lent(_reader, kafka) as consumer:
        metadata = consumer.list_topics(topic, timeout=60).topics[topic]
        if metadata.error is not None:
            return []
        consumer.assign(
            [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in metadata.partitions]
        )
        found = _read(consumer, topic, set(metadata.partitions))
        consumer.unassign()
    return found


def _reader(kafka: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "allow.auto.create.topics": False,
            # A reader that is sent to the end would miss messages without a word.
            "auto.offset.reset": "error",
            # Transactions use additional offsets: the end is requested, not computed.
            "enable.partition.eof": True,
            # The broker waits so long for more before it says that there is none.
            "fetch.wait.max.ms": 10,
        }
    )


def _read(consumer: Consumer, topic: str, unread: set[int]) -> list[Message]:
    """What is in these partitions until the end of each."""
    found: list[Message] = []
    deadline = time.monotonic() + 180
    while unread:
        # One by one: a request for many waits until the time is over.
        message = consumer.poll(0.1)
        if message is None:
            assert time.monotonic() < deadline, f"the ends of {unread} of {topic} were not reached"
            continue
        if (error := message.error()) is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            unread.discard(message.partition())
            continue
        partition, offset, key = message.partition(), message.offset(), message.key()
        assert partition is not None
        assert offset is not None
        assert key is not None
        found.append(
            Message(
                topic,
                partition,
                offset,
                key.decode(),
                _text(message.value()),
                {name: _text(value) for name, value in headers_of(message)},
            )
        )
    return found


def headers_of(message: KafkaMessage) -> list[tuple[str, bytes | None]]:
    """Of a message that was received: the client's types allow what one to be sent may have."""
    headers = message.headers()
    assert isinstance(headers, list)
    return cast("list[tuple[str, bytes | None]]", headers)


def _text(value: bytes | None) -> str | None:
    """As text; bytes that are none, as surrogates."""
    return None if value is None else value.decode(errors="surrogateescape")


def patience(seconds: float) -> float:
    """Return how long to wait on this machine, now, for what takes less than `seconds` on a quiet one.

    A deadline only ends what hangs. Of a slow machine nothing is known but its load, which it shows late.
    """
    queue = os.getloadavg()[0] / (os.cpu_count() or 1)
    return 3 * seconds * min(max(queue, 1), 5)


def wait_until(
    condition: Callable[[], object], *, seconds: float = 60.0, what: str = "condition", pace: float = 0.2
) -> None:
    """Polls a condition until it holds; fails after the deadline.

    Args:
        seconds: on a quiet machine; below five for what is not expected, where the deadline passes each time.
        pace: most seconds between two polls; more for a condition that costs much and takes long.
    """
    if seconds >= 5:
        seconds = patience(seconds)
    began = time.monotonic()
    deadline = began + seconds
    pause = 0.01
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"{what} did not hold within {seconds} s"
        # Most conditions are a connection's work for a database that others need: most of the time is theirs.
        pause = min(max(pause, 2 * (now - began)), pace)
        time.sleep(pause)
        pause *= 1.4
        began = time.monotonic()


@cache
def run_prefix() -> str:
    """What this process's topics begin with: processes and runs side by side leave each other's alone.

    Drawn at its first use: processes that are forked have imported the same module.
    """
    return f"t{uuid.uuid4().hex[:8]}-"


_IDENTITIES: Final[set[str]] = set()


def password_of(dsn: str) -> str:
    """What libpq sends for this DSN; for clients that cannot read the file it names."""
    with psycopg.connect(dsn) as connection:
        return connection.info.password


def may_log_in(dsn: str) -> str:
    """Return the attributes for CREATE ROLE, for a role that logs in with this DSN except for `user`.

    A local server's DSN names a password file, whose one password is sent for each role.
    """
    return f"LOGIN PASSWORD '{password_of(dsn)}'"


def topic_prefix() -> str:
    """What a test's topics begin with; those are removed when the run ends."""
    return f"{run_prefix()}{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def known_secrets() -> Iterator[None]:
    """What one test calls a secret is a word in the messages of another."""
    before = set(secret._known)
    yield
    secret._known.intersection_update(before)


@dataclass(frozen=True)
class Lasting:
    """Servers and databases that are made once in a session, at the first request, and last until it ends.

    A fixture of the session is not enough: one with parameters ends at each change of them, and each
    directory that imports a fixture has one of its own.
    """

    ends: ExitStack
    made: dict[object, Any] = field(default_factory=dict)

    def once(self, name: object, make: Callable[[], AbstractContextManager[Any]]) -> Any:
        """What was made under this name; made now where nothing was."""
        if name not in self.made:
            self.made[name] = self.ends.enter_context(make())
        return self.made[name]


@pytest.fixture(scope="session")
def lasting() -> Iterator[Lasting]:
    with ExitStack() as ends:
        yield Lasting(ends)


def _check_servers(stack: Stack) -> None:
    """Those that were given may be wrong: then one line says so, in place of hundreds."""
    remedy = "correct it, or unset it and the tests start one"
    try:
        psycopg.connect(stack.dsn, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        pytest.fail(f"OUTBOX_DSN: {secret.first_line(error)}: {remedy}", pytrace=False)
    if not any(answers(bootstrap) for bootstrap in stack.kafka.split(",")):
        pytest.fail(f"OUTBOX_KAFKA: no broker answers at {stack.kafka}: {remedy}", pytrace=False)


def quicken_logins(dsn: str) -> None:
    """Let a server of tests compute less for each login of this role, where the server can.

    The usual 4,096 iterations double what a connection costs; a driver for Go wants 1,000.
    """
    with psycopg.connect(dsn, autocommit=True) as admin:
        if admin.info.server_version >= 160_000:
            admin.execute("SET scram_iterations = 1000")
            # Workers that begin together would change the role at the same time, which fails.
            admin.execute("SELECT pg_advisory_lock(hashtext('quicken_logins'))")
            role, password = sql.Identifier(admin.info.user), admin.info.password
            admin.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(role, password))


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    settings = load_settings()
    # A suite starts a broker some eighty times.
    record_startup(settings.local_jars)
    with local_stack(settings) as running:
        _check_servers(running)
        if not settings.dsn:
            quicken_logins(running.dsn)
        try:
            with kafka_clients.lasting(running.kafka):
                yield running
        finally:
            if settings.kafka or memory.STOPS not in os.environ:
                _remove_topics(running.kafka)


def _remove_topics(kafka: str) -> None:
    """Remove those of this run: a broker with ten thousand partitions takes minutes to start."""
    admin = administrator(kafka)
    ours = (run_prefix(), *(f"outbox-progress-{identity}-" for identity in _IDENTITIES))
    made = [name for name in admin.list_topics(timeout=30).topics if name.startswith(ours)]
    for deleted in (admin.delete_topics(made, operation_timeout=30) if made else {}).values():
        deleted.result(600)


def create_database(admin: psycopg.Connection[Any], name: str, template: str) -> None:
    """Copy a database."""
    # As files, which takes half the time where they lie in memory.
    strategy = " STRATEGY FILE_COPY" if admin.info.server_version >= 150_000 else ""
    _when_unused(admin, f"CREATE DATABASE {name} TEMPLATE {template}{strategy}")


def drop_database(admin: psycopg.Connection[Any], name: str) -> None:
    """Drop a database, and end the sessions in it."""
    _when_unused(admin, f"DROP DATABASE {name} WITH (FORCE)")


def _when_unused(admin: psycopg.Connection[Any], statement: str) -> None:
    """Run a statement about a database, which fails while a session or the reader of a slot is in it.

    The server ends them a moment after their clients, and waits for that for five seconds, or not at all.
    """

    def is_done() -> bool:
        try:
            admin.execute(statement.encode())
        except psycopg.errors.ObjectInUse:
            return False
        return True

    wait_until(is_done, what=statement)


_SESSIONS: Final[dict[tuple[int, int, str], psycopg.Connection[Any]]] = {}


def session(dsn: str) -> psycopg.Connection[Any]:
    """The session in which this thread asks a database one question after the other: 13 ms less for each."""
    # A process that is forked has its own.
    name = os.getpid(), threading.get_ident(), dsn
    with suppress(KeyError, psycopg.OperationalError):
        _SESSIONS[name].execute("SELECT")
        return _SESSIONS[name]
    made = _SESSIONS[name] = psycopg.connect(
        dsn, autocommit=True, prepare_threshold=None, application_name="tests"
    )
    return made


def end_sessions(dsn: str) -> None:
    """Close those of all threads in a database that is dropped."""
    for name in list(_SESSIONS):
        if name[0] == os.getpid() and name[2] == dsn:
            _SESSIONS.pop(name).close()


@contextmanager
def fresh_database(dsn: str, template: str = "template1") -> Iterator[str]:
    """A database of its own on the server of `dsn`, copied from another one."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    create_database(session(dsn), name, template)
    for system, oid in session(dsn).execute(
        "SELECT system_identifier, oid FROM pg_control_system(), pg_database WHERE datname = %s", [name]
    ):
        _IDENTITIES.add(f"{system:x}-{oid}")
    made = psycopg.conninfo.make_conninfo(dsn, dbname=name)
    try:
        yield made
    finally:
        end_sessions(made)
        drop_database(session(dsn), name)


@contextmanager
def _migrated(stack: Stack) -> Iterator[str]:
    with fresh_database(stack.dsn) as dsn:
        schema.migrate(load_settings(dsn=dsn))
        yield str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


@pytest.fixture
def migrated(stack: Stack, lasting: Lasting) -> str:
    """The name of a database that was migrated today, by UTC: a copy takes a third of the time."""
    name: str = lasting.once(("migrated", datetime.now(UTC).date()), lambda: _migrated(stack))
    return name


ADOPT: Final = """
UPDATE outbox_shards SET done = pg_current_snapshot(),
    database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


@pytest.fixture
def outbox(stack: Stack, migrated: str) -> Iterator[Outbox]:
    with fresh_database(stack.dsn, migrated) as dsn:
        # As if it had been migrated itself; a relay refuses a copy.
        session(dsn).execute(ADOPT)
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        yield Outbox(load_settings(dsn=dsn, kafka=stack.kafka, topic=topic))
