"""The real Debezium in a Kafka Connect cluster of two workers, configured by `outbox debezium config`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from outbox_pipelines.database import schema
from outbox_pipelines.debezium.connect import Connect
from outbox_pipelines.debezium.connector_config import connector_name, table
from outbox_pipelines.debezium.connector_reading import read
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.local.postgres import Postgres
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
from tests.interop.connect_rest import ConnectRest, drop_slot, make_slot
from tests.interop.connect_workers import Worker, cluster
from tests.kafka_clients import AdminClient

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
name = "Domain Events"
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
        table = {"OUTBOX_TABLE": json.dumps(self.settings.table)} if self.settings.table else {}
        return table | {
            "OUTBOX_DSN": self.settings.dsn.reveal(),
            "OUTBOX_KAFKA": self.settings.kafka,
            "OUTBOX_TOPIC": self.settings.topic,
            "OUTBOX_CONNECT_URL": self.settings.connect_url.reveal(),
            "OUTBOX_CONNECTOR": self.settings.connector,
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return in_process.run(arguments, clean_environment() | self.environment | environment)

    @property
    def rest(self) -> ConnectRest:
        return ConnectRest(self.settings.connect_url.reveal())

    @property
    def name(self) -> str:
        return connector_name(self.settings)

    def register(self, **environment: str) -> None:
        """Make publication and slot, and post what `outbox debezium config` prints."""
        printed = self.run("debezium", "config", "--password", self.password, **environment)
        assert printed.returncode == 0, printed.stderr
        config = json.loads(printed.stdout)
        dsn = self.settings.dsn.reveal()
        make_slot(dsn, config["slot.name"], table(self.settings))
        self.rest.put(self.name, config)
        wait_until(lambda: read(self.settings).slot_active, seconds=60, what="a task that reads the slot")

    def delete(self) -> None:
        """Remove the connector with its offsets, its slot and its publication."""
        self.rest.remove(self.name)
        for slot in self.slots():
            drop_slot(self.settings.dsn.reveal(), slot)

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


@pytest.fixture(scope="module")
def place(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server of its own: a replication slot is the whole server's matter."""
    directory = tmp_path_factory.mktemp("connect")
    with (
        postgres.Postgres(directory / "postgres") as server,
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
            connect_url=place.url,
            connector=prefix,
            **given,
        )
        shop = Shop(settings, place.password)
        try:
            yield shop
        finally:
            shop.delete()


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
    shop.register()
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
    table = tomllib.loads(DESCRIPTION)
    names = "id=event-id,aggregate-type=,aggregate-id=key"
    with a_shop(place, table=table, header_names=names) as shop:
        topic = shop.settings.topic.format(aggregate_type="order")
        _topics(shop.settings.kafka, topic)
        with psycopg.connect(shop.settings.dsn.reveal(), autocommit=True) as connection:
            connection.execute(TEXTBOOK)
            more = {"OUTBOX_TABLE": json.dumps(table), "OUTBOX_HEADER_NAMES": names}
            shop.register(**more)
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
    shop.register(OUTBOX_DELIVERY=delivery)
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
    shop.register()
    shop.write("1")
    shop.write("2", payload=json.dumps({"text": "x" * 50_000}))
    shop.write("3")
    # A busy worker may not answer for a moment, which is a problem too.
    wait_until(lambda: any("task" in each for each in read(shop.settings).problems), what="the failed task")
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
    shop.rest.settled("POST", f"/connectors/{shop.name}/restart?includeTasks=true")
    wait_until(lambda: shop.published()[-2:] == ["2", "3"], seconds=60, what="it, and what waited behind it")


def test_the_relay_takes_over_from_a_task_that_cannot_continue(shop: Shop) -> None:
    """Guards against an event that holds back all others, with no way out but to lose it."""
    _topics(shop.settings.kafka, shop.settings.topic.format(aggregate_type="order"), partitions=1)
    shop.register()
    shop.write("1")
    wait_until(lambda: shop.published() == ["1"], seconds=60, what="the first event")
    shop.write("1", aggregate_type="no topic!")
    wait_until(lambda: any("task" in each for each in read(shop.settings).problems), what="the failed task")
    (problem,) = read(shop.settings).problems
    assert "no topic!" in problem
    shop.write("2")
    # As docs/debezium-on-connect.md says.
    shop.rest.stop(shop.name)
    wait_until(lambda: not read(shop.settings).slot_active, what="the end of the task")
    (slot,) = shop.slots()
    relayed = shop.run("relay", "--start-at", f"slot:{slot}", "--until-empty", OUTBOX_MAX_ATTEMPTS="1")
    assert shop.published() == ["1", "2"], relayed.stderr
    shop.delete()
    shop.register()
    shop.write("3")
    wait_until(lambda: shop.published() == ["1", "2", "3"], seconds=60, what="an event after it")


def test_a_stuck_task_is_found_though_it_reports_running(shop: Shop) -> None:
    """Guards against a connector that looks healthy and sends nothing."""
    shop.register()
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


def test_what_an_operator_does(shop: Shop) -> None:
    """Guards against remedies that Kafka Connect does not know, and a guide that leaves a slot behind."""
    missing = shop.run("debezium", "status")
    assert (missing.returncode, "outbox debezium config" in missing.stdout) == (1, True)
    shop.register()
    for action, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
        shop.rest.settled("PUT", f"/connectors/{shop.name}/{action}")
        wait_until(partial(_has_state, shop, state), what=state)
    stopped = shop.run("debezium", "status", "--json")
    assert f"PUT /connectors/{shop.name}/resume" in json.loads(stopped.stdout)["problems"][0]
    shop.write("1")
    shop.rest.resume(shop.name)
    wait_until(lambda: shop.published() == ["1"], seconds=60, what="what was written while it was stopped")
    shop.delete()
    assert shop.slots() == []
    # A later connector of this name begins at its own slot.
    shop.register()
    shop.write("2")
    wait_until(lambda: set(shop.published()) == {"1", "2"}, seconds=60, what="it")
