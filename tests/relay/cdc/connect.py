"""A worker of Kafka Connect with one connector, which does what Debezium does with a slot.

The slot, the log and the topics are real; the REST and the connector are played, so that a test needs no JVM.
What they leave out is in tests/interop.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from confluent_kafka import Producer

from outbox_pipelines.database import connect
from outbox_pipelines.event import Event
from outbox_pipelines.relay.cdc import pgoutput
from outbox_pipelines.relay.cdc.stream import SlotLostError, Stream
from outbox_pipelines.relay.kafka.encoding import Encoder
from outbox_pipelines.settings import Settings
from tests.debezium.serving import Asked, serving

_POLL = 0.02


class PlayedConnector:
    """A connector: it publishes transaction after transaction, and leaves the last one unconfirmed.

    Args:
        offset: the end of the last transaction that it has published, as Kafka Connect keeps it.
    """

    def __init__(self, settings: Settings, config: dict[str, str], offset: int) -> None:
        self.settings, self.config, self.offset = settings, config, offset
        self.state, self.trace = "STOPPED", ""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        if self._thread is None:
            self.state, self._end = "RUNNING", threading.Event()
            self._thread = threading.Thread(target=self._run)
            self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(600)
        self._thread, self.state = None, "STOPPED"

    def status(self) -> dict[str, Any]:
        has_failed = bool(self.trace) and self.state == "RUNNING"
        task = {
            "id": 0,
            "state": "FAILED" if has_failed else "RUNNING",
            "worker_id": "a",
            "trace": self.trace,
        }
        return {
            "connector": {"state": self.state, "worker_id": "a"},
            "tasks": [task] if self.state == "RUNNING" else [],
        }

    def _run(self) -> None:
        try:
            if self.config["database.port"] == "1":
                raise psycopg.OperationalError("connection refused")
            while not self._end.is_set():
                with closing(connect(self.settings, name="played connector", replication=True)) as session:
                    try:
                        stream = Stream(session, self.config["slot.name"], self.config["publication.name"])
                    except psycopg.errors.ObjectInUse:
                        self._end.wait(_POLL)
                        continue
                    self._refuse_gap()
                    self._publish(stream)
        except (psycopg.Error, SlotLostError) as error:
            self.trace = str(error)

    def _refuse_gap(self) -> None:
        with psycopg.connect(self.settings.require_dsn()) as connection:
            query = (
                "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = %s"
            )
            row = connection.execute(query, [self.config["slot.name"]]).fetchone()
        if row is not None and self.offset and row[0] > self.offset:
            raise psycopg.OperationalError("the slot is further than the offset")

    def _publish(self, stream: Stream) -> None:
        producer = Producer({"bootstrap.servers": self.settings.kafka})
        encode = Encoder(self.settings).encode
        decoder = pgoutput.Decoder(with_time=False)
        events: list[Event] = []
        while not self._end.is_set():
            message = stream.receive()
            if message is None:
                stream.wait(_POLL)
            elif message[0] == pgoutput.RELATION:
                decoder.relation(message)
            elif message[0] == pgoutput.INSERT:
                events.append(decoder.row(message, 1 << 30)[0])
            elif message[0] == pgoutput.COMMIT:
                end, before = pgoutput.end_of_commit(message), self.offset
                if end > before:
                    for event in events:
                        value, headers = encode(event)
                        topic = self.settings.topic.format(aggregate_type=event.aggregate_type)
                        producer.produce(topic, value, event.aggregate_id, headers=headers)
                    assert producer.flush(30) == 0
                    self.offset = end
                events = []
                stream.confirm(before)


class PlayedConnect:
    """The worker: its URL, and its connectors."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.url = ""
        self.connectors: dict[str, PlayedConnector] = {}
        self.refuses: Callable[[str, str, Any], bool] = lambda method, what, body: False
        self._offsets: dict[str, int] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return status and answer, as Kafka 4.1 does."""
        with self._lock:
            parts = path.partition("?")[0].split("/")[1:]
            if parts[0] == "connector-plugins":
                return 200, {"configs": []}
            name, what = parts[1], "/".join(parts[2:])
            if self.refuses(method, what, body):
                return 500, {"error_code": 500, "message": "no"}
            found = self.connectors.get(name)
            if (method, what) == ("PUT", "config"):
                return self._put(name, body)
            if found is None:
                return 404, {"error_code": 404, "message": f"Connector {name} not found"}
            return self._of(found, name, method, what)

    def _put(self, name: str, config: dict[str, str]) -> tuple[int, Any]:
        if (before := self.connectors.get(name)) is not None:
            was_running = before.state == "RUNNING"
            before.stop()
            before.config, before.trace = config, ""
            if was_running:
                before.resume()
            return 200, config
        made = self.connectors[name] = PlayedConnector(self.settings, config, self._offsets.get(name, 0))
        made.resume()
        return 201, config

    def _of(self, found: PlayedConnector, name: str, method: str, what: str) -> tuple[int, Any]:
        self._offsets[name] = found.offset
        if (method, what) == ("GET", "config"):
            return 200, found.config
        if (method, what) == ("GET", "status"):
            return 200, found.status()
        if (method, what) == ("GET", "offsets"):
            return 200, {"offsets": []}
        if (method, what) == ("PUT", "resume"):
            found.resume()
        elif (method, what) == ("PUT", "stop"):
            found.stop()
        elif (method, what) == ("DELETE", "offsets"):
            if found.state != "STOPPED":
                return 400, {"error_code": 400, "message": "Connectors must be in the STOPPED state"}
            found.offset = self._offsets[name] = 0
        elif (method, what) == ("DELETE", ""):
            found.stop()
            self._offsets[name] = found.offset
            del self.connectors[name]
        else:
            return 404, {"error_code": 404, "message": f"{method} {what} is not played"}
        return 202, None


@contextmanager
def played(settings: Settings) -> Iterator[PlayedConnect]:
    """Such a worker, for the length of the block."""
    worker = PlayedConnect(settings)

    def answer(asked: Asked) -> tuple[int, str]:
        status, found = worker.answer(asked.method, asked.path, asked.body)
        return status, "" if found is None else json.dumps(found)

    with serving(answer) as worker.url:
        try:
            yield worker
        finally:
            for connector in worker.connectors.values():
                connector.stop()
