"""docs/consuming*.md: their examples run, and do what the pages say."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.consumer.testing import handle, make_event
from tests import forks
from tests.conftest import clean_environment, wait_until
from tests.consumer.place import Place, effect, running, uuid7

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("consuming.md", "consuming-failures.md", "consuming-tuning.md")
TEXT = "\n".join((DOCS / page).read_text() for page in PAGES)
BLOCKS = dict(re.findall(r"^```python\n# (\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def test_the_examples_are_those_tested_here() -> None:
    ways = {"migrate", "consume", "async", "batch", "errors", "share", "typed", "testing", "dedupe_table"}
    assert set(BLOCKS) == ways
    assert len(BLOCKS) == TEXT.count("```python")


def test_the_consumer_works_as_it_stands_there(place: Place, tmp_path: Path) -> None:
    """Guards against a guide whose first example fails."""
    place.rows("CREATE TABLE invoices (order_id text PRIMARY KEY, total int)")
    service = tmp_path / "service.py"
    example = BLOCKS["migrate"] + BLOCKS["consume"]
    # Topic and group of this test's own.
    for theirs, ours in (("order-events", place.topic), ('"billing"', repr(place.topic))):
        assert theirs in example
        example = example.replace(theirs, ours)
    service.write_text(f"dsn, kafka = {place.dsn!r}, {place.kafka!r}\n{example}")
    place.put('{"total": 5}', key="42", id=str(uuid7()), event_type="order.placed")
    place.put('{"total": 7}', key="43", id=str(uuid7()), event_type="order.placed")
    place.put("{}", key="42", id=str(uuid7()), event_type="order.cancelled")
    process: forks.Popen[str] = forks.Popen(
        [sys.executable, service], env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(
            lambda: process.poll() is not None or place.value("SELECT count(*) FROM processed_events") == 3,
            what="all events handled",
        )
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert place.rows("SELECT order_id, total FROM invoices") == [("43", 7)]


def test_the_table_that_exists_already_works_as_it_stands_there(place: Place) -> None:
    place.rows(
        "CREATE SCHEMA legacy; CREATE TABLE legacy.processed_events (event_id uuid, source text, "
        "processed_at timestamptz DEFAULT now(), UNIQUE (event_id, source))"
    )
    known, new = uuid7(), uuid7()
    place.rows("INSERT INTO legacy.processed_events VALUES (%s, 'billing')", known)
    example = BLOCKS["dedupe_table"]
    for theirs, ours in (
        ("order-events", place.topic),
        ("broker:9092", place.kafka),
        ("postgresql://billing@db/billing", place.dsn),
    ):
        assert theirs in example
        example = example.replace(theirs, ours)
    names: dict[str, Any] = {}
    exec(example, names)
    names["consumer"].on("order.placed")(effect)
    place.send(known, new)
    with running(names["consumer"]):
        wait_until(lambda: place.processed() == 2, what="both events")
    assert place.rows("SELECT event_id FROM effects") == [(str(new),)]


def test_the_batch_works_as_it_stands_there(place: Place) -> None:
    place.rows("CREATE TABLE invoices (order_id text PRIMARY KEY, total int)")
    place.put('{"total": 5}', key="42", id=str(uuid7()), event_type="order.placed")
    consumer = place.bare()
    exec(BLOCKS["batch"], {"consumer": consumer, "psycopg": psycopg, "Event": Event})
    with running(consumer):
        wait_until(lambda: place.rows("SELECT order_id, total FROM invoices") == [("42", 5)])


def test_what_shares_a_transaction_works_as_it_stands_there(place: Place) -> None:
    place.rows("CREATE TABLE invoices (order_id text PRIMARY KEY, total int)")
    for n in range(10):
        place.put(f'{{"total": {n}}}', key=str(n), id=str(uuid7()), event_type="order.placed")
    consumer = place.bare()
    exec(BLOCKS["share"], {"consumer": consumer, "psycopg": psycopg, "Event": Event})
    with running(consumer):
        wait_until(lambda: place.value("SELECT count(*) FROM invoices") == 10, what="all events")


def test_typed_payloads_and_their_tests_work_as_they_stand_there(place: Place) -> None:
    place.rows("CREATE TABLE invoices (order_id text PRIMARY KEY, total numeric)")
    place.rows("CREATE TABLE totals (total numeric)")
    names: dict[str, Any] = {"consumer": place.bare(), "psycopg": psycopg, "Event": Event}
    # Not with this module's annotations as text: there is no module that they could be looked up in.
    exec(compile(BLOCKS["typed"], "typed", "exec", dont_inherit=True), names)
    with psycopg.connect(place.dsn) as connection:
        connection.execute("INSERT INTO invoices VALUES (42, 0)")
        placed = make_event("order.placed", {"total": 5})
        changed = make_event("order.changed", {"total": 6}, aggregate_id=42)
        assert handle(names["consumer"], placed, changed, using=connection) == ["handled", "handled"]
        assert connection.execute("SELECT total FROM totals").fetchall() == [(5,)]
        assert connection.execute("SELECT order_id, total FROM invoices").fetchall() == [("42", 6)]
        connection.rollback()

    names["consumer"] = place.bare(on_error={KeyError: "dead_letter"})
    exec(BLOCKS["batch"], names)
    exec(BLOCKS["testing"], names)
    tests = [each for name, each in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    for test in tests:
        with psycopg.connect(place.dsn) as connection:
            test(connection)
            connection.rollback()


def test_the_asynchronous_one_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against arguments that `AsyncConsumer` does not take, and a `run` that is no coroutine."""
    ran: list[object] = []
    monkeypatch.setattr(asyncio, "run", lambda coroutine: ran.append(coroutine.close()))
    engine = create_async_engine("postgresql+asyncpg://")
    names = {"asyncio": asyncio, "engine": engine, "kafka": "broker:9092"}
    exec(
        BLOCKS["async"],
        {**names, "async_sessionmaker": async_sessionmaker, "Event": Event, "AsyncSession": AsyncSession},
    )
    assert ran == [None]


def test_what_exceptions_mean_can_be_configured() -> None:
    names: dict[str, Any] = {
        "Consumer": Consumer,
        "Event": Event,
        "psycopg": psycopg,
        "dsn": "",
        "kafka": "b:1",
    }
    exec(BLOCKS["errors"], names)
    assert isinstance(names["consumer"], Consumer)


@pytest.mark.parametrize(
    "link",
    [
        *re.findall(r"\]\(([^)]+)\)", TEXT),
        "../sql/consumer/0001_processed.sql",
        "../sql/consumer/0002_inbox.sql",
        "../sql/consumer/0003_partition_owners.sql",
        "../sql/consumer/0004_processed_mark.sql",
    ],
)
def test_links(link: str) -> None:
    assert (DOCS / link.partition("#")[0]).exists()


def test_the_uuid_of_other_ids_is_the_consumers() -> None:
    """Guards against a recipe with which another language processes events of this consumer again."""
    found = re.search(r"namespace\s+`([^`]+)`,\s+name\s+`([^`]+)`", TEXT)
    assert found is not None
    namespace, name = found.groups()
    event = make_event("order.placed", {}, id="1", topic="order-events")
    assert uuid.uuid5(uuid.UUID(namespace), name) == event._identity(event.topic, by_key=False)
