"""From the real Debezium on its textbook table to the append-only outbox and back, under writers."""

from __future__ import annotations

import json
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import NewTopic

from outbox_pipelines.debezium.connector_config import connector
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.adopt import steps
from outbox_pipelines.existing.adopt.drain import Rest
from outbox_pipelines.settings import Settings, load_settings
from tests.conftest import Message, fresh_database, read_topic, topic_prefix, wait_until
from tests.existing.adopt.debezium_table import DDL, MAPPING, PUBLICATION, insert, insert_and_delete
from tests.interop.connect_rest import ConnectRest
from tests.interop.test_debezium_on_connect import Place, place
from tests.kafka_clients import AdminClient
from tests.relay.threads import running

__all__ = ["place"]
KEYS = "abcd"


class Moved:
    """The table, Debezium's connector on it, and the commands."""

    def __init__(self, place: Place, settings: Settings, slot: str) -> None:
        self.settings, self.slot, self.name = settings, slot, slot
        self.cluster = ConnectRest(place.url)
        self.outbox = settings.model_copy(update={"table": {}, "retry_seconds": 0.05})
        self._config = connector(settings, slot=slot, publication=PUBLICATION, password=place.password)
        # As most people have it: then a connector does not confirm its last transaction.
        for name in ("heartbeat.interval.ms", "heartbeat.action.query", "message.prefix.exclude.list"):
            del self._config[name]

    def register(self) -> None:
        self.cluster.put(self.name, self._config)
        wait_until(lambda: self.is_read, seconds=60, what="a connector that reads its slot")

    def stop(self) -> None:
        self.cluster.stop(self.name)
        wait_until(lambda: not self.is_read, what="the end of the connector's session")

    @property
    def is_read(self) -> bool:
        with psycopg.connect(self.settings.dsn.reveal()) as connection:
            query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
            return connection.execute(query, [self.slot]).fetchone() == (True,)

    def messages(self) -> list[Message]:
        return read_topic(self.settings.kafka, self.settings.topic.format(aggregate_type="Order"))

    def more(self) -> None:
        """Wait for more messages than there are."""
        count = len(self.messages()) + 50
        wait_until(lambda: len(self.messages()) > count, seconds=60, what="more events")

    def switch(self) -> None:
        steps.prepare(self.settings)
        steps.switch(self.settings, ["rows", f"publication:{PUBLICATION}"], seconds=60, say=print)

    def drain(self, rest: Rest = Rest.WAIT, *, seconds: float = 30) -> int:
        return steps.drain(self.settings, seconds=seconds, say=print, rest=rest)

    def back(self) -> None:
        steps.back(self.settings, seconds=60, say=print)


@pytest.fixture
def moved(place: Place, tmp_path: Path) -> Iterator[Moved]:
    with fresh_database(place.server.dsn) as dsn:
        prefix = topic_prefix()
        slot = prefix.replace("-", "_")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(DDL.encode())
            # Debezium's default: its slot also delivers the append-only outbox.
            connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES".encode())
        table = tomllib.loads(MAPPING.format(slot=slot).replace('"outbox"', '"public.outbox"'))
        topic = f"{prefix}.{{aggregate_type}}-events"
        admin = AdminClient({"bootstrap.servers": place.kafka})
        name = topic.format(aggregate_type="Order")
        admin.create_topics([NewTopic(name, 4, 1)])[name].result(30)
        given = {"kafka": place.kafka, "topic": topic}
        settings = load_settings(dsn=dsn, table=table, **given).model_copy(update={"db_schema": "box"})
        made = Moved(place, settings, slot)
        try:
            yield made
        finally:
            made.cluster.remove(made.name)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                    "WHERE slot_name = %s",
                    [slot],
                )


@contextmanager
def _writing(dsn: str) -> Iterator[dict[str, int]]:
    """Two writers of four aggregates: one keeps its rows, one deletes them at once; the counts."""
    stop, counts = threading.Event(), dict.fromkeys(KEYS, 0)
    failures: list[BaseException] = []

    def run(first: int) -> None:
        write = (insert, insert_and_delete)[first]
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                turn = first
                while not stop.wait(0.002):
                    key = KEYS[turn % 4]
                    with connection.transaction():
                        write(connection, key, "order.placed", {"n": counts[key]})
                        write(connection, key, "order.paid", {"n": counts[key] + 1})
                    counts[key] += 2
                    turn += 2
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert failures == []


def test_there_and_back_while_events_are_written(moved: Moved) -> None:
    """Guards against a gap, a repetition, another order or another message (G1, G2)."""
    moved.register()
    with _writing(moved.settings.dsn.reveal()) as counts:
        moved.more()
        # The connector runs, and publishes what is older than the switch.
        moved.switch()
        with running(moved.outbox):
            with pytest.raises(NotReadyError, match="stop the connector"):
                moved.drain(seconds=3)
            moved.stop()
            assert moved.drain() == 0
            moved.more()
            moved.back()
        moved.cluster.resume(moved.name)
        moved.more()

        # The connector stops, and cannot publish the rest.
        moved.stop()
        before = sum(counts.values())
        wait_until(lambda: sum(counts.values()) > before + 50, what="events that nothing publishes")
        moved.switch()
        with pytest.raises(NotReadyError, match="missing in Kafka"):
            moved.drain(seconds=0)
        assert moved.drain(Rest.PUBLISH) > 50
        with running(moved.outbox):
            moved.more()
            moved.back()
        # Its slot is further than what it knows itself.
        moved.cluster.forget_offsets(moved.name)
        moved.cluster.resume(moved.name)
        moved.more()

        moved.switch()
        moved.stop()
        moved.drain(Rest.PUBLISH)
        with running(moved.outbox):
            moved.more()
    with running(moved.outbox):
        wait_until(lambda: len(moved.messages()) >= sum(counts.values()), seconds=60, what="all events")
    messages = moved.messages()
    found = defaultdict(list)
    for message in messages:
        found[message.key].append(json.loads(message.value or "")["n"])
    assert found == {key: list(range(count)) for key, count in counts.items()}
    seen = {tuple(sorted(name for name, value in each.headers.items() if value)) for each in messages}
    assert seen == {("aggregate-type", "event-type", "id")}
