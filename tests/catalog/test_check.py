"""`outbox catalog check`: the event catalog compared with the table."""

from __future__ import annotations

import json

from outbox_pipelines.catalog.comparison import compare
from outbox_pipelines.settings import load_settings
from tests.catalog.conftest import CATALOG, Write
from tests.days.archive.days import days_ago, make_days
from tests.days.archive.days import write as write_day
from tests.schema.events import insert
from tests.schema.servers import Database


def test_the_table_is_compared_with_the_event_catalog(database: Database, write: Write) -> None:
    """Guards against undocumented types that go unnoticed, and counts of one day alone."""
    early = days_ago(3)
    make_days(database, early)
    write_day(database, early, [{}, {"aggregate_type": "invoice"}])
    with database.connect() as connection:
        insert(connection)
        insert(connection, event_type="order.lost")
    path = str(write(CATALOG))
    done = database.outbox(
        "catalog", "check", "--json", OUTBOX_CATALOG_FILE=path, OUTBOX_TOPIC="order-events"
    )
    assert done.exit_code == 1
    assert done.stderr == "outbox: order.lost is written but not documented: add it to the event catalog\n"
    lost, placed, shipped = json.loads(done.stdout)
    assert (lost["event_type"], lost["lifecycle"], lost["status"]) == ("order.lost", None, "undocumented")
    assert (placed["status"], placed["events"]) == ("ok", 3)
    assert placed["aggregate_types"] == ["invoice", "order"]
    assert placed["first_at"].startswith(f"{early}T00:00:00")
    assert placed["last_at"] > placed["first_at"]
    assert (shipped["status"], shipped["events"], shipped["first_at"]) == ("never seen", 0, None)


def test_the_settings_name_the_documented_topic(database: Database, write: Write) -> None:
    """Guards against consumers that look for events in a topic which the relay does not send them to."""
    path = str(write(CATALOG))
    rule = "order.placed=orders"
    assert (
        database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path, OUTBOX_EVENT_TYPES=rule).exit_code == 0
    )
    with database.connect() as connection:
        insert(connection)
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path, OUTBOX_EVENT_TYPES=rule)
    assert (done.exit_code, "MISROUTED" in done.stdout) == (1, True)
    assert done.stderr.startswith(
        "outbox: order.placed is documented for another topic than the settings name"
    )
    assert database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path).exit_code == 0
    path = str(
        write(CATALOG.replace("topic: order-events", "topic: order-events\n    aggregate_type: order"))
    )
    with database.connect() as connection:
        insert(connection, aggregate_type="invoice")
    found = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path)
    assert (found.exit_code, "MISROUTED" in found.stdout) == (1, True)


def test_what_is_never_seen_is_only_said(database: Database, write: Write) -> None:
    """Guards against a failing pipeline because a type is rare, or its events are in the archive."""
    with database.connect() as connection:
        insert(connection)
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=str(write(CATALOG)))
    assert (done.exit_code, done.stderr) == (0, "")
    [heading, placed, shipped] = done.stdout.splitlines()
    assert heading.split()[:3] == ["event", "type", "events"]
    assert placed.split()[:2] == ["order.placed", "1"]
    assert shipped.endswith("active     never seen")


def test_a_retired_type_is_not_to_be_written(database: Database, write: Write) -> None:
    """Guards against a type that is retired only in the catalog, and against older rows that count."""
    before = days_ago(3)
    make_days(database, before)
    write_day(database, before)
    retired = CATALOG.replace("topic: order-events", "lifecycle: retired")
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=str(write(retired)))
    assert done.exit_code == 1
    assert done.stderr.startswith("outbox: order.placed is retired but still written: stop its writer")
    since = retired.replace("lifecycle: retired", f"lifecycle: retired\n    retired_on: {days_ago(2)}")
    path = str(write(since))
    assert database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path).exit_code == 0
    with database.connect() as connection:
        insert(connection)
    assert database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path).exit_code == 1


def test_deprecated_and_proposed_types_are_noted(database: Database, write: Write) -> None:
    """Guards against a deprecated type that fails the check while its writers are moved."""
    with database.connect() as connection:
        insert(connection)
    for lifecycle in ("deprecated", "proposed"):
        path = write(CATALOG.replace("topic: order-events", f"lifecycle: {lifecycle}"))
        settings = load_settings(dsn=database.dsn, catalog_file=path)
        found = {each.event_type: (each.status, each.is_wrong) for each in compare(settings)}
        assert found["order.placed"] == (lifecycle, False)


def test_without_an_event_catalog_it_says_what_to_set(database: Database) -> None:
    """Guards against a check that passes because nothing was checked."""
    for command in ("check", "render"):
        done = database.outbox("catalog", command)
        assert done.exit_code == 2
        assert done.stderr.startswith("outbox: no event catalog: set OUTBOX_CATALOG_FILE")
        assert len(done.stderr.splitlines()) == 1


def test_a_type_that_has_no_schema_for_its_format_is_named(database: Database, write: Write) -> None:
    """Guards against events that are rejected later, where the event catalog says it before."""
    path = str(write(CATALOG.replace("{type: string, format: date-time}", "{}")))
    given = {"OUTBOX_FORMAT": "avro", "OUTBOX_REGISTRY_URL": "http://none", "OUTBOX_TOPIC": "order-events"}
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path, **given)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "outbox: order.placed has no Avro schema: payload.at: any value: name a type",
        "outbox: order.shipped has no schema in the event catalog: add one",
    ]
    path = str(write(CATALOG.partition("  order.shipped:")[0]))
    assert database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path, **given).exit_code == 0


def test_a_version_that_is_not_listed_is_named(database: Database, write: Write) -> None:
    """Guards against events that are rejected for their version, and reports about an aggregate's version."""
    listed = CATALOG.replace("topic: order-events", "version: 3\n    versions: {1: {}}")
    with database.connect() as connection:
        for version in (1, 3, None):
            insert(connection, version=version)
        insert(connection, event_type="order.shipped", version=7)
    path = str(write(listed))
    placed, shipped = compare(load_settings(dsn=database.dsn, catalog_file=path))
    assert (placed.seen and placed.seen.versions, shipped.seen and shipped.seen.versions) == (
        *([1, 3, None], [None]),
    )
    assert database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path).exit_code == 0
    with database.connect() as connection:
        insert(connection, version=2)
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path)
    assert (done.exit_code, "UNLISTED" in done.stdout) == (1, True)
    assert done.stderr.startswith(
        "outbox: order.placed is written in a version that the event catalog does not"
    )
