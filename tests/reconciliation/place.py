"""A past day whose events were published, and consumers that have handled them, as far as a test says so."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from confluent_kafka import TopicPartition

from outbox_pipelines.consumer import migrate
from outbox_pipelines.days.partitions import ahead
from outbox_pipelines.reconciliation import steps as days
from outbox_pipelines.reconciliation.day_events import DAY_MS, bounds
from outbox_pipelines.reconciliation.report import Finding, Report, Side
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings
from tests import kafka_clients
from tests.conftest import Message, Outbox
from tests.consumer.place import commit, uuid7

TODAY: Final = datetime.now(UTC).date()
DAY: Final = TODAY - timedelta(3)
START_MS, END_MS = bounds(DAY)


@dataclass(frozen=True)
class Place:
    """One test's outbox, together with the tables of consumers."""

    outbox: Outbox
    directory: Path

    @property
    def settings(self) -> Settings:
        return self.outbox.settings.model_copy(
            update={"consumers": self.consumers, "archive": str(self.directory / "archive")}
        )

    @property
    def file(self) -> Path:
        return self.directory / "consumers.toml"

    @property
    def consumers(self) -> dict[str, Any]:
        """As in the sections `[consumers.NAME]`."""
        return tomllib.loads(self.file.read_text()) if self.file.exists() else {}

    @property
    def topic(self) -> str:
        return self.outbox.topic()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.outbox.connect() as connection:
            cursor = connection.execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    # --- the outbox -------------------------------------------------------------------------------------

    def write(self, events: int, *, keys: int = 3, day: date = DAY, **columns: object) -> list[str]:
        """Events of a past day, a second apart, the n-th about aggregate n modulo `keys`; their ids."""
        start, _ = bounds(day)
        ahead.ensure(self.settings, since=day)
        given = {"aggregate_type": "order", "event_type": "order.placed", "payload": "{}"}
        written = []
        with self.outbox.connect(autocommit=False) as connection:
            connection.execute("SET LOCAL outbox.backfill = on")
            for n in range(events):
                at = start + n * 1000 + 500
                row = {
                    **given,
                    "id": str(uuid7(at)),
                    "aggregate_id": str(n % keys),
                    "created_at": datetime.fromtimestamp(at / 1000, UTC),
                    **columns,
                }
                connection.execute(
                    f"INSERT INTO outbox ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})".encode(),
                    list(row.values()),
                )
                written.append(str(row["id"]))
        return written

    def relay(self) -> None:
        """Publishes what is committed."""
        service.relay(self.settings, until_empty=True)

    def pass_over(self) -> None:
        """What is committed counts as published, and is not."""
        self.rows("UPDATE outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL")

    # --- the topic --------------------------------------------------------------------------------------

    def send(self, *ids: str, key: str = "0", at_ms: int = 0, topic: str = "", **headers: str) -> None:
        """Messages that no relay has sent."""
        producer = kafka_clients.Producer(
            {"bootstrap.servers": self.settings.kafka, "partitioner": "murmur2_random", "linger.ms": 0}
        )
        for event_id in ids:
            producer.produce(
                topic or self.topic,
                "{}",
                key=key,
                timestamp=at_ms,
                headers=list({"id": event_id, **headers}.items()),
            )
        assert producer.flush(20) == 0

    def messages(self) -> list[Message]:
        return self.outbox.messages()

    # --- a consumer -------------------------------------------------------------------------------------

    def name(self, **entries: object) -> None:
        """A consumer `billing`, with its tables, that has done nothing yet."""
        entries = {"group": f"{self.topic}-billing", **entries}
        lines = [f"{name} = {json.dumps(value)}" for name, value in entries.items()]
        self.file.write_text("\n".join(["[billing]", *lines]))
        with self.outbox.connect() as connection:
            migrate(connection)

    def consumer(self, ids: Sequence[str] | None = None, **entries: object) -> None:
        """The same, at the end of the topic, having handled these; all that is there by default."""
        self.name(**entries)
        messages = self.messages()
        self.handle(*([each.headers["id"] or "" for each in messages] if ids is None else ids))
        self.commit(*messages)

    def handle(self, *ids: str, at: datetime | None = None) -> None:
        """Rows of `processed_events`."""
        for event_id in ids:
            self.rows(
                "INSERT INTO processed_events (event_id, processed_at, bucket, source) "
                "VALUES (%s, coalesce(%s, now()), processed_bucket(%s), 'billing')",
                *(event_id, at, event_id),
            )

    def receive(self, event_id: str, status: str) -> None:
        """A row of the inbox, of an event that was received."""
        self.rows(
            'INSERT INTO inbox (message_id, source, topic, partition, "offset", key, event_type, headers, '
            "sent_at, state, last_error) VALUES (%s, 'billing', %s, 0, 0, '', '', '[]', now(), %s, 'no')",
            *(event_id, self.topic, status),
        )

    def commit(self, *messages: Message) -> None:
        """The group has done with these."""
        client = kafka_clients.Consumer(
            {"bootstrap.servers": self.settings.kafka, "group.id": f"{self.topic}-billing"}
        )
        ends: dict[int, int] = {}
        for message in messages:
            ends[message.partition] = max(message.offset + 1, ends.get(message.partition, 0))
        if ends:
            offsets = [TopicPartition(self.topic, *place) for place in ends.items()]
            commit(client, offsets)
        client.close()

    # --- the reconciliation -----------------------------------------------------------------------------

    def reconcile(self, day: date = DAY) -> Report:
        return days.reconcile(self.settings, day)


def new_id(day: date = DAY) -> str:
    """Drawn on the day, of no event."""
    start, _ = bounds(day)
    return str(uuid7(start + uuid.uuid4().int % DAY_MS))


def found(side: Side) -> dict[str, int]:
    """What was found there, and how often."""
    return {each.kind.name: each.count for each in side.findings}


def one(side: Side, name: str) -> Finding:
    (finding,) = [each for each in side.findings if each.kind.name == name]
    return finding
