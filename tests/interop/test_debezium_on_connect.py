"""The real Debezium in a Kafka Connect cluster of two workers, run by `outbox debezium …`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from outbox_pipelines import schema
from outbox_pipelines.debezium.connect import Connect
from outbox_pipelines.debezium.reading import read
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.local.server import free_port
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings, load_settings
from tests import in_process
from tests.conftest import (
    Message,
    clean_environment,
    fresh_database,
    password_of,
    patience,
    read_topic,
    topic_prefix,
    wait_until,
)
from tests.interop.connect_workers import Worker, cluster

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PAYLOADS = (
    '{"total": 5, "note": "größer <&>", "nested": {"b": 1, "a": [1, 2]}}',
    '{"price": 1.10, "large": 1e400, "i": 1234567890123456789012, "none": null, "mixed": [1, "x", {"z": 1}]}',
    *("[1, 2]", "0.1000", '"text \\u0001 \\" \\\\"', "null", "{}"),
)
TEXTBOOK = """\
CREATE TABLE "Domain Events" (
    event_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255) NOT NULL,
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, body jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz)"""
DESCRIPTION = """\
table = "Domain Events"
order = "created_at"
[columns]
id = "event_id"
payload = "body"
aggregate_type = "aggregatetype"
aggregate_id = "aggregateid"
event_type = "type"
published_at = "published_at"
"""


@dataclass(frozen=True)
class Place:
    """The servers, and where the workers find the database's password."""

    server: Postgres
    workers: list[Worker]
    kafka: str
    password: str

    @property
    def url(self) -> str:
        return ",".join(worker.url for worker in self.workers)


@dataclass(frozen=True)
class Shop:
    """An outbox of a test, and the commands on it."""

    settings: Settings
    password: str

    @property
    def environment(self) -> dict[str, str]:
        # Without its description, no command knows what the outbox is.
        table = {"OUTBOX_TABLE_FILE": str(self.settings.table_file)} if self.settings.table_file else {}
        return table | {
            "OUTBOX_DSN": self.settings.dsn.reveal(),
            "OUTBOX_KAFKA": self.settings.kafka,
            "OUTBOX_TOPIC": self.settings.topic,
            "OUTBOX_CONNECT": self.settings.connect.reveal(),
            "OUTBOX_CONNECTOR": self.settings.connector,
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return in_process.run(arguments, clean_environment() | self.environment | environment)

    def register(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("debezium", "register", "--password", self.password, *arguments, **environment)

    def write(self, *aggregates: str, aggregate_type: str = "order", payload: str = "{}") -> None:
        """An event for each, each in a transaction of its own."""
        with psycopg.connect(self.settings.dsn.reveal(), autocommit=True) as connection:
            for aggregate in aggregates:
                connection.execute(
                    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                    "VALUES (%s, %s, 'order.placed', %s)",
                    [aggregate_type, aggregate, payload],
                )

    def published(self, aggregate_type: str = "order") -> list[str]:
        topic = self.settings.topic.format(aggregate_type=aggregate_type)
        return [message.key for message in read_topic(self.settings.kafka, topic)]

    def slots(self) -> list[str]:
        with psycopg.connect(self.settings.dsn.reveal()) as connection:
            return [name for (name,) in connection.execute("SELECT slot_name FROM pg_replication_slots")]

    def publications(self) -> list[str]:
        with psycopg.connect(self.settings.dsn.reveal()) as connection:
            return [name for (name,) in connection.execute("SELECT pubname FROM pg_publication")]


@pytest.fixture(scope="module")
def place(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server of its own: a replication slot is the whole server's matter."""
    directory = tmp_path_factory.mktemp("connect")
    with (
        postgres.running(directory / "postgres") as server,
        cluster(directory, stack.kafka, {"exactly.once.source.support": "enabled"}) as workers,
    ):
        secret = directory / "secret.properties"
        secret.write_text(f"password={password_of(server.dsn)}\n")
        yield Place(server, workers, stack.kafka, f"${{file:{secret}:password}}")


@contextmanager
def a_shop(place: Place, **given: object) -> Iterator[Shop]:
    prefix = topic_prefix()
    with fresh_database(place.server.dsn) as dsn:
        settings = load_settings(
            dsn=dsn,
            kafka=place.kafka,
            topic=f"{prefix}.{{aggregate_type}}-events",
            connect=place.url,
            connector=prefix,
            **given,
        )
        shop = Shop(settings, place.password)
        try:
            yield shop
        finally:
            shop.run("debezium", "delete", "--yes")
            assert shop.slots() == []


@pytest.fixture
def shop(place: Place) -> Iterator[Shop]:
    """An outbox of its own; its connector is deleted afterwards."""
    with a_shop(place) as made:
        schema.migrate(made.settings)
        yield made


def _topics(kafka: str, *names: str, partitions: int = 8, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    for made in admin.create_topics([NewTopic(n, partitions, 1, config=config) for n in names]).values():
        made.result(patience(10))


def _configure(kafka: str, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": kafka})
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(patience(10))


def _has_state(shop: Shop, state: str) -> bool:
    return read(shop.settings).state == state


def _seen(message: Message) -> tuple[object, ...]:
    """All that a consumer sees, but for headers without a value, which the relay does not send."""
    headers = {name: value for name, value in message.headers.items() if value is not None}
    return message.topic, message.partition, message.key, message.value, headers


def _compare(settings: Settings, topics: list[str], written: int) -> None:
    """Wait for all events out of Debezium, publish the rows with the relay, and compare."""

    def messages() -> list[Message]:
        return sorted(message for topic in topics for message in read_topic(settings.kafka, topic))

    wait_until(lambda: len(messages()) == written, seconds=60, what="all events out of Debezium")
    theirs = messages()
    service.relay(settings, until_empty=True)
    ours = [message for message in messages() if message not in theirs]
    assert [_seen(message) for message in ours] == [_seen(message) for message in theirs]
    assert len(ours) == written


def test_messages_equal_those_of_the_relay(shop: Shop) -> None:
    """Guards against consumers that must change when the engine does."""
    topics = [shop.settings.topic.format(aggregate_type=name) for name in ("order", "Customer")]
    _topics(shop.settings.kafka, *topics)
    done = shop.register()
    assert done.returncode == 0, done.stderr
    columns = "aggregate_type, aggregate_id, event_type, payload"
    with psycopg.connect(shop.settings.dsn.reveal()) as connection:
        for n, payload in enumerate(PAYLOADS):
            for aggregate in ("1", "größer", '4"2', "x" * 300):
                connection.execute(
                    f"INSERT INTO outbox ({columns}) VALUES ('order', %s, 'order.placed', %s)".encode(),
                    [aggregate, payload],
                )
            connection.execute(
                f"INSERT INTO outbox ({columns}, idempotency_key, correlation_id, causation_id, traceparent, "
                "version) VALUES ('Customer', %s, 'CustomerMoved', %s, %s, 'c-1', 'größer', %s, %s)".encode(),
                [str(n), payload, f"key {n}", TRACEPARENT, n],
            )
            connection.commit()
    _compare(shop.settings, topics, 5 * len(PAYLOADS))


def test_messages_of_an_existing_table_equal_those_of_the_relay(place: Place, tmp_path: Path) -> None:
    """Guards against a description of a table that Debezium reads otherwise than the relay."""
    file = tmp_path / "table.toml"
    file.write_text(DESCRIPTION)
    names = "id=event-id,aggregate-type=,aggregate-id=key"
    with a_shop(place, table_file=file, header_names=names) as shop:
        topic = shop.settings.topic.format(aggregate_type="order")
        _topics(shop.settings.kafka, topic)
        with psycopg.connect(shop.settings.dsn.reveal(), autocommit=True) as connection:
            connection.execute(TEXTBOOK)
            more = {"OUTBOX_TABLE_FILE": str(file), "OUTBOX_HEADER_NAMES": names}
            done = shop.register(**more)
            assert done.returncode == 0, done.stderr
            for n, payload in enumerate(PAYLOADS):
                connection.execute(
                    'INSERT INTO "Domain Events" (aggregatetype, aggregateid, type, body) '
                    "VALUES ('order', %s, 'order.placed', %s)",
                    [str(n % 3), payload],
                )
        _compare(shop.settings, [topic], len(PAYLOADS))
        status = shop.run("debezium", "status", **more)
        assert status.returncode == 0, status.stdout


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_the_task_moves_from_a_killed_worker(place: Place, shop: Shop, delivery: str) -> None:
    """Guards against events that are lost or overtaken with a worker, and a state that hides it."""
    _topics(place.kafka, shop.settings.topic.format(aggregate_type="order"), partitions=1)
    assert shop.register(OUTBOX_DELIVERY=delivery).returncode == 0
    cluster = Connect(place.url)
    owner = cluster.status(shop.settings.connector)["tasks"][0]["worker_id"]
    (killed,) = [worker for worker in place.workers if worker.id == owner]
    written: list[str] = []
    ends = threading.Event()

    def write() -> None:
        with psycopg.connect(shop.settings.dsn.reveal(), autocommit=True) as connection:
            while not ends.is_set():
                connection.execute(
                    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                    "VALUES ('order', %s, 'order.placed', '{}')",
                    [str(len(written))],
                )
                written.append(str(len(written)))

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            wait_until(lambda: len(shop.published()) > 100, seconds=60, what="the first events")
            killed.kill()
            before = len(shop.published())
            wait_until(lambda: len(shop.published()) > before, seconds=60, what="events by the other worker")
        finally:
            ends.set()
        writer.result(patience(10))
    moved = cluster.status(shop.settings.connector)["tasks"][0]
    killed.start()
    assert (moved["state"], moved["worker_id"] == owner) == ("RUNNING", False)
    wait_until(lambda: shop.published()[-1] == written[-1], seconds=60, what="the last event")
    found = shop.published()
    assert list(dict.fromkeys(found)) == written
    if delivery == "exactly_once":
        assert found == written
    assert read(shop.settings).problems == []


def test_a_poisoned_event_is_found_and_named(shop: Shop) -> None:
    """Guards against a task that ended because of one event, while nothing says which."""
    topic = shop.settings.topic.format(aggregate_type="order")
    _topics(shop.settings.kafka, topic, partitions=1, **{"max.message.bytes": "10000"})
    assert shop.register().returncode == 0
    shop.write("1")
    shop.write("2", payload=json.dumps({"text": "x" * 50_000}))
    shop.write("3")
    wait_until(lambda: read(shop.settings).problems, seconds=60, what="the failed task")
    shown = shop.run("debezium", "status")
    assert shown.returncode == 1
    (problem,) = [line for line in shown.stdout.splitlines() if line.startswith("!")]
    assert "task 0 has failed on 127.0.0.1:" in problem
    assert "too large" in problem
    assert "max.message.bytes" in problem
    # What Kafka Connect had passed on when it noticed is published before it: docs/debezium-on-connect.md.
    assert "2" not in shop.published()
    # As the problem says.
    _configure(shop.settings.kafka, topic, "max.message.bytes", "2000000")
    assert shop.run("debezium", "restart").returncode == 0
    wait_until(lambda: shop.published()[-2:] == ["2", "3"], seconds=60, what="it, and what waited behind it")


def test_the_relay_takes_over_from_a_task_that_cannot_continue(shop: Shop) -> None:
    """Guards against an event that holds back all others, with no way out but to lose it."""
    _topics(shop.settings.kafka, shop.settings.topic.format(aggregate_type="order"), partitions=1)
    assert shop.register().returncode == 0
    shop.write("1")
    wait_until(lambda: shop.published() == ["1"], seconds=60, what="the first event")
    shop.write("1", aggregate_type="no topic!")
    wait_until(lambda: read(shop.settings).problems, seconds=60, what="the failed task")
    (problem,) = read(shop.settings).problems
    assert "no topic!" in problem
    shop.write("2")
    # As docs/debezium-on-connect.md says.
    assert shop.run("debezium", "stop").returncode == 0
    wait_until(lambda: not read(shop.settings).slot_active, what="the end of the task")
    (slot,) = shop.slots()
    relayed = shop.run("relay", "--start-at", f"slot:{slot}", "--until-empty", OUTBOX_MAX_ATTEMPTS="1")
    assert shop.published() == ["1", "2"], relayed.stderr
    assert shop.run("debezium", "delete", "--yes").returncode == 0
    assert shop.register().returncode == 0
    shop.write("3")
    wait_until(lambda: shop.published() == ["1", "2", "3"], seconds=60, what="an event after it")


def test_a_stuck_task_is_found_though_it_reports_running(shop: Shop) -> None:
    """Guards against a connector that looks healthy and sends nothing."""
    assert shop.register().returncode == 0
    with psycopg.connect(shop.settings.dsn.reveal()) as connection:
        row = connection.execute("SELECT active_pid FROM pg_replication_slots").fetchone()
    assert row is not None
    # As behind a firewall that drops packets: the session is there, and nothing comes.
    os.kill(row[0], signal.SIGSTOP)
    try:
        shop.write("1")
        wait_until(lambda: read(shop.settings).waiting_seconds > 3, seconds=60, what="a wait of 3 s")
        found = read(shop.settings)
        status = shop.run(
            "status", "--json", OUTBOX_ERROR_AT="connector_lag=3", OUTBOX_WARN_AT="connector_lag=off"
        )
    finally:
        os.kill(row[0], signal.SIGCONT)
    assert (found.state, [task.state for task in found.tasks]) == ("RUNNING", ["RUNNING"])
    checks = {check["check"]: check["status"] for check in json.loads(status.stdout)["checks"]}
    assert (checks["connector"], checks["connector_lag"]) == ("ok", "error")
    wait_until(lambda: shop.published() == ["1"], seconds=60, what="the event")
    wait_until(lambda: read(shop.settings).waiting_seconds == 0, seconds=60, what="its confirmation")


def test_the_commands(shop: Shop) -> None:
    """Guards against commands that do not fit together, and a slot that stays."""
    missing = shop.run("debezium", "status")
    assert (missing.returncode, "outbox debezium register" in missing.stdout) == (1, True)
    assert "there is no connector" in shop.run("debezium", "pause").stderr
    plan = shop.register("--dry-run")
    assert (plan.returncode, len(plan.stdout.splitlines())) == (0, 3)
    assert shop.slots() == []
    assert shop.register().returncode == 0
    assert shop.register().stdout == "nothing to do: the connector is registered with this configuration\n"
    (slot,) = shop.slots()
    assert slot.startswith("debezium_test_")
    for action, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
        assert shop.run("debezium", action).returncode == 0
        wait_until(partial(_has_state, shop, state), what=state)
    stopped = shop.run("debezium", "status", "--json")
    assert "outbox debezium resume" in json.loads(stopped.stdout)["problems"][0]
    shop.write("1")
    assert shop.run("debezium", "resume").returncode == 0
    wait_until(lambda: shop.published() == ["1"], seconds=60, what="what was written while it was stopped")
    asked = shop.run("debezium", "delete")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    gone = shop.run("debezium", "delete", "--yes", "--json")
    assert (gone.returncode, json.loads(gone.stdout)["found"]) == (0, True)
    assert (shop.slots(), shop.publications()) == ([], [])
    assert shop.run("debezium", "delete", "--yes").returncode == 1
    # A later connector of this name begins at its own slot.
    assert shop.register().returncode == 0
    shop.write("2")
    wait_until(
        lambda: shop.published() == ["1", "2"] or set(shop.published()) == {"1", "2"}, seconds=60, what="it"
    )


def test_the_name_of_another_connector(shop: Shop) -> None:
    assert shop.register().returncode == 0
    topic = {"OUTBOX_TOPIC": "other-{aggregate_type}"}
    refused = shop.register(**topic)
    assert refused.returncode == 2
    assert "route.topic.replacement is" in refused.stderr
    other = shop.register("--password", "${env:OTHER}")
    assert "database.password differs" in other.stderr
    assert "OTHER" not in other.stderr
    assert "reads the slot" in shop.register("--slot", "another").stderr
    replaced = shop.register("--replace", **topic)
    assert replaced.returncode == 0, replaced.stderr
    assert (
        Connect(shop.settings.connect.reveal())
        .config(shop.settings.connector)["transforms.outbox.route.topic.replacement"]
        .startswith("other-")
    )


def test_what_kafka_connect_refuses_leaves_nothing(shop: Shop) -> None:
    """Guards against a slot without a reader, which fills the disk."""
    wrong = shop.register("--port", "9")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[0].startswith("database.hostname: ")
    # Valid, and it does not run in time: the last moment at which something can go wrong.
    late = shop.register("--seconds", "0.01")
    assert (late.returncode, "after 0 s" in late.stderr) == (1, True)
    assert (shop.slots(), shop.publications()) == ([], [])
    assert shop.settings.connector not in Connect(shop.settings.connect.reveal()).names()


def test_what_the_database_lacks(place: Place, shop: Shop) -> None:
    """Guards against riddles: each obstacle is named with what to run."""
    dsn = shop.settings.dsn.reveal()
    assert "does not answer" in shop.register(OUTBOX_CONNECT="http://127.0.0.1:9").stderr
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        connection.execute("CREATE ROLE weak LOGIN")
        assert "ALTER ROLE weak REPLICATION" in shop.register("--user", "weak").stderr
        connection.execute("DROP ROLE weak")
        assert "no role stranger" in shop.register("--user", "stranger").stderr
        version = connection.info.server_version
        if version >= 150000:
            connection.execute("CREATE PUBLICATION part FOR TABLE outbox")
            refused = shop.register("--publication", "part").stderr
            assert "publish_via_partition_root" in refused
            connection.execute("ALTER PUBLICATION part SET (publish_via_partition_root)")
            connection.execute("ALTER PUBLICATION part SET TABLE outbox (id, payload, created_at)")
            refused = shop.register("--publication", "part").stderr
            assert "leaves out the column" in refused
            connection.execute("DROP PUBLICATION part")
    with psycopg.connect(place.server.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_create_logical_replication_slot('of_another', 'pgoutput')")
        try:
            assert "not this outbox's" in shop.register("--slot", "of_another").stderr
        finally:
            admin.execute("SELECT pg_drop_replication_slot('of_another')")
    assert (shop.slots(), shop.publications()) == ([], [])


def test_a_low_wal_level_is_named(shop: Shop, tmp_path: Path) -> None:
    with postgres.running(tmp_path, {"wal_level": "replica"}) as server:
        settings = shop.settings.model_copy(update={"dsn": server.dsn})
        schema.migrate(settings)
        refused = Shop(settings, shop.password).register()
    assert refused.returncode == 2
    assert "ALTER SYSTEM SET wal_level" in refused.stderr


def test_a_pooler_is_named(place: Place, shop: Shop, tmp_path: Path) -> None:
    pgbouncer = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if pgbouncer is None:
        pytest.skip("pgbouncer is not installed")
    port = free_port()
    server = psycopg.conninfo.conninfo_to_dict(shop.settings.dsn.reveal())
    lines = (
        "[databases]",
        f"* = host={server['host']} port={server['port']} user=postgres "
        f"password={password_of(place.server.dsn)}",
        *(
            "[pgbouncer]",
            "listen_addr = 127.0.0.1",
            f"listen_port = {port}",
            "unix_socket_dir =",
            "auth_type = any",
        ),
        *(["user = nobody"] if os.geteuid() == 0 else []),
    )
    config = tmp_path / "pgbouncer.ini"
    config.write_text("\n".join(lines))
    pooler = subprocess.Popen(
        [pgbouncer, "-q", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    dsn = psycopg.conninfo.make_conninfo(shop.settings.dsn.reveal(), port=port)
    try:
        wait_until(lambda: "pooler" in shop.register(OUTBOX_DSN=dsn).stderr, what="a refusal")
        # The pooler for our own statements, and the server for Debezium.
        direct = shop.register("--port", str(server["port"]), OUTBOX_DSN=dsn)
    finally:
        pooler.kill()
        pooler.wait(patience(10))
    assert direct.returncode == 0, direct.stderr
