"""The consumers that a history can judge: the idempotent one, and two that are wrong in one way each.

Each member is a process: ``python -m tests.history.consumers NAME`` consumes until it is ended; it finds
database, broker and topics in the environment, as relays do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psycopg

from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.settings import Settings, load_settings
from tests import kafka_clients
from tests.history import effects, standstill, tapes
from tests.history.business import KINDS, LONG_KEY
from tests.history.record import HANDLES_REPLAYS
from tests.model.consumer.tape import ConsumerRecording

# A short session, so that others take over soon from who was killed or frozen; the broker must allow it.
_QUICK = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 200}
MEMBERS = 2


def topics(settings: Settings) -> list[str]:
    return [settings.topic.format(aggregate_type=kind) for kind in KINDS]


def idempotent(
    settings: Settings,
    group: str = "history",
    *,
    per_transaction: int = 1,
    replays: Literal["skip", "handle"] = "skip",
    **kafka: Any,
) -> Consumer:
    """The real one."""
    consumer = Consumer(
        source="history",
        topics=topics(settings),
        kafka={"bootstrap.servers": settings.kafka, "group.id": _group(settings, group), **kafka},
        dsn=settings.dsn,
        # Processes crash all the time here: that must not cause a dead letter.
        max_attempts=1000,
        retry_seconds=0.5,
    )

    tried: set[str] = set()

    @consumer.on_other(per_transaction=per_transaction, replays=replays)
    def handle(event: Event, connection: psycopg.Connection[Any]) -> None:
        about = str(event.aggregate_type), str(event.aggregate_id), event.payload
        if event.replay is not None:
            effects.make(connection, *about, str(event.replay.id))
            return
        token = event.payload["token"]
        # So that the key is stored with the event that is to be tried again.
        if len(str(event.aggregate_id)) == LONG_KEY and token < "2" and token not in tried:
            tried.add(token)
            raise RuntimeError("the first try fails")
        effects.make(connection, *about)

    return consumer


class Broken:
    """The skeleton: two steps for each message, with nothing that holds them together."""

    steps: tuple[Callable[[Any, Any], None], ...]

    def __init__(self, settings: Settings, **kafka: Any) -> None:
        self._connection: psycopg.Connection[Any] = psycopg.connect(settings.dsn)
        self._client = kafka_clients.Consumer(
            {
                "bootstrap.servers": settings.kafka,
                "group.id": _group(settings, "history"),
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                **kafka,
            }
        )
        self._client.subscribe(topics(settings))

    def poll(self) -> Any:
        """The next message; None where there is none for a moment."""
        message = self._client.poll(0.2)
        return None if message is None or message.error() else message

    def affect(self, message: Any) -> None:
        kind = dict(message.headers())["aggregate-type"].decode()
        effects.make(self._connection, kind, message.key().decode(), json.loads(message.value()))
        self._connection.commit()

    def commit_offset(self, message: Any) -> None:
        self._client.commit(message=message, asynchronous=False)

    def close(self) -> None:
        self._connection.close()
        self._client.close()

    def run(self) -> None:
        while True:
            if (message := self.poll()) is not None:
                for step in self.steps:
                    step(self, message)


class CommitsFirst(Broken):
    """As clients do that commit offsets automatically: a crash between the steps loses an effect."""

    steps = (Broken.commit_offset, Broken.affect)


class KeepsNoRecord(Broken):
    """In the right order, but nothing tells that it was done: what comes again is done again."""

    steps = (Broken.affect, Broken.commit_offset)


CONSUMERS: Mapping[str, Callable[..., Consumer | Broken]] = {
    "idempotent": idempotent,
    "shared": partial(idempotent, per_transaction=50),
    HANDLES_REPLAYS: partial(idempotent, replays="handle"),
    "broken.commits_first": CommitsFirst,
    "broken.keeps_no_record": KeepsNoRecord,
}


def command(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", "tests.history.consumers", name


def _group(settings: Settings, name: str) -> str:
    return f"{topics(settings)[0]}-{name}"


if __name__ == "__main__":
    standstill.listen()
    make: Callable[[], Any] = partial(CONSUMERS[sys.argv[1]], load_settings(), **_QUICK)
    if sys.argv[1].startswith("broken"):
        make().run()
    else:
        recording = ConsumerRecording(make, (effects, "make"), tapes.SAMPLE)
        with tapes.sampled(recording, Path(os.environ["HISTORY_STEPS"])):
            recording.run()
