"""A small installation with every kind of thing that a release leaves in a database and an archive.

Invariants:
- One database: the outbox, an existing table with marks, a consumer's tables, a key store.
- One instance of Dagster, some jobs and sensors of which have run.
- What waits can be finished later by any version: no event depends on the time or on Kafka's content.
"""

from __future__ import annotations

import json
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import dagster as dg

from outbox_pipelines.consumer import Consumer, OutageError
from outbox_pipelines.database import schema
from outbox_pipelines.days.partitions import close
from outbox_pipelines.relay import service
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.settings import load_settings, make_settings
from outbox_pipelines.subject_keys import SubjectKeys, erasures
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, session, wait_until
from tests.consumer.place import running
from tests.existing import textbook
from tests.reconciliation.place import TODAY, Place
from tests.relay.threads import relays, wait_for_holders
from tests.relay.topic import NOISE, create_topic
from tests.releases import dagster_storage
from tests.releases.dagster_storage import run, served, tick
from tests.replay.test_replays import dropped, typed

MASTER: Final = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
WRITER, OPERATOR = "release_writer", "release_operator"
DROPPED, ARCHIVED, CLOSED = (TODAY - timedelta(days) for days in (5, 4, 3))
SOURCE: Final = "billing"


def make(outbox: Outbox, directory: Path, instance: dg.DagsterInstance) -> None:
    """Fill an empty database and an instance of Dagster, and write the archive into the folder."""
    settings = outbox.settings
    schema.migrate(settings)
    place = Place(outbox, directory)
    create_topic(outbox, 1, **{"max.message.bytes": "2000"})
    with relays(outbox, 2):
        wait_for_holders(outbox, 1)
        assert resharding.change(settings, 2)
    _days(place, instance)
    _consumer(place)
    consumers = json.dumps(place.consumers)
    assert run(instance, served(outbox, consumers=consumers), "reconcile_day", CLOSED)
    _today(outbox)
    _keys(outbox)
    _existing_table(outbox)
    _remove_empty_days(outbox)
    _alarms(outbox, instance)
    for kind, role, options in (
        ("writer", WRITER, ", ARRAY['order'], 'shop'"),
        ("relay", OPERATOR, ""),
        ("operator", OPERATOR, ""),
        ("analyst", OPERATOR, ""),
    ):
        session(settings.dsn).execute(f"SELECT outbox_grant_{kind}('{role}'{options})".encode())


def _days(place: Place, instance: dg.DagsterInstance) -> None:
    ours = served(place.outbox, archive=place.settings.archive)
    for day in (DROPPED, ARCHIVED, CLOSED):
        place.write(3, day=day, headers='{"tenant": "7"}', correlation_id="c-1")
    for shard in (0, 1):
        assert run(instance, ours, "relay_once", shard=shard, until_empty=True)
    dropped(place, DROPPED)
    for day in (ARCHIVED, CLOSED):
        (closing,) = close.close(place.settings, day)
        assert closing.closed, closing.why_not
    assert run(instance, ours, "archive_day", ARCHIVED)
    again = typed(
        place, "--since", str(DROPPED), "--until", str(DROPPED), "--same-topic", "--reason", "a test"
    )
    assert again.returncode == 0, again.stderr


def _alarms(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Sensors that have reported the dead letters and a failed run; sessions that have failed."""
    ours = served(outbox)
    with dagster_storage.hooked() as hook:
        tick(instance, ours, "health")
        tick(instance, ours, "alerts")
        assert not run(instance, ours, "archive_day", CLOSED)
        tick(instance, ours, "alerts")
        assert {"dead_letters", f"failed run of archive_day {CLOSED}"} <= dagster_storage.alerted(hook)
    dagster_storage.fail_at_once(instance, ours)


def _remove_empty_days(outbox: Outbox) -> None:
    """Keep the dump short: a relay makes the coming days again."""
    coming = "DELETE FROM outbox_days WHERE day > (now() AT TIME ZONE 'UTC')::date RETURNING day"
    for (day,) in outbox.rows(coming):
        session(outbox.settings.dsn).execute(f"DROP TABLE outbox_{day:%Y%m%d}".encode())


def _consumer(place: Place) -> None:
    """Its tables, with events that were handled, wait, are paused, or are dead letters."""
    place.name()
    for event_type in ("order.placed", "order.failing", "order.failing", "order.paused"):
        place.outbox.write(event_type, event_type=event_type)
    place.relay()
    consumer = Consumer(
        source=SOURCE,
        topics=[place.topic],
        kafka={"bootstrap.servers": place.settings.kafka, "group.id": f"{place.topic}-billing"},
        dsn=place.settings.dsn,
        retry_seconds=300,
    )

    @consumer.on("order.failing")
    def failing(event: Any, connection: Any) -> None:
        raise ValueError("it fails")

    @consumer.on("order.paused")
    def paused(event: Any, connection: Any) -> None:
        raise OutageError("its service is unavailable")

    @consumer.on("order.placed", replays="handle")
    def placed(event: Any, connection: Any) -> None: ...

    with running(consumer):
        wait_until(lambda: place.rows("SELECT count(*) FROM inbox") == [(3,)], what="the inbox")
    place.rows(
        "UPDATE inbox SET state = 'failed', attempts = 5 "
        "WHERE seq = (SELECT min(seq) FROM inbox WHERE event_type = 'order.failing')"
    )
    place.rows(
        "INSERT INTO inbox_audit (actor, action, reason, seq, message_id, source) "
        "SELECT 'ann', 'replay', 'corrected', seq, message_id, source FROM inbox LIMIT 1"
    )
    place.rows(
        "INSERT INTO partition_owners (source, consumer_group, topic, partition, owner, crashes) "
        "VALUES (%s, 'billing', %s, 0, gen_random_uuid(), 1)",
        *(SOURCE, place.topic),
    )


def _today(outbox: Outbox) -> None:
    """Events that are parked, retried, dead letters in each state, delayed, or not relayed yet."""
    with outbox.connect() as connection, connection.transaction():
        for key in ("dead", "discarded", "replayed"):
            emit(connection, "order", key, "order.placed", {"noise": NOISE[:320]})
    assert service.relay(_with(outbox, max_attempts=1), until_empty=True)
    for action, key in (("discard", "discarded"), ("replay", "replayed")):
        done = outbox.outbox("dead-letters", action, "--aggregate-id", key, "--reason", "a test", "--yes")
        assert done.returncode == 0, done.stderr
    with outbox.connect() as connection, connection.transaction():
        emit(connection, "order", "waiting", "order.placed", {"noise": NOISE[:320]})
        emit(connection, "order", "waiting", "order.placed", {"n": 1}, idempotency_key="key-1", version=2)
    assert service.relay(_with(outbox, retry_seconds=300.0), until_empty=True)
    with outbox.connect() as connection, connection.transaction():
        far = timedelta(days=3650)
        content = {"n": 1}
        emit(connection, "order", "far", "order.placed", content, deliver_after=far, later_events_wait=True)
        emit(connection, "order", "far", "order.placed", {"n": 2})
        emit(connection, "order", "due", "order.placed", {"n": 1}, deliver_after=timedelta(seconds=1))
        emit(connection, "order", "unpublished", "order.placed", {"n": 1})


def _with(outbox: Outbox, **more: object) -> Any:
    return outbox.settings.model_copy(update=more)


def _keys(outbox: Outbox) -> None:
    dsn = outbox.settings.dsn
    given = make_settings(keys_dsn=dsn, master_key=MASTER)
    erasures.migrate(given)
    keys = SubjectKeys(dsn, master_key=MASTER)
    with outbox.connect() as connection, connection.transaction():
        for subject in ("ann", "bob"):
            payload = keys.protect({"email": f"{subject}@example.com"}, {"email": subject})
            emit(connection, "customer", subject, "customer.moved", payload)
    keys.close()
    assert erasures.forget(given, "bob", actor="ann", reason="asked for") is not None


def _existing_table(outbox: Outbox) -> None:
    given = outbox.settings
    session(given.dsn).execute(textbook.PUBLISHED_AT.encode())
    table = textbook.Table(
        Outbox(
            load_settings(
                dsn=given.dsn,
                kafka=given.kafka,
                topic=given.topic,
                table=tomllib.loads(textbook.PUBLISHED_AT_MAPPING),
            )
        )
    )
    table.write(("old", {"n": 1}), ("old", {"n": 2}))
    table.drain()
    table.write(("old", {"n": 3}))
