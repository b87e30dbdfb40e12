"""What is counted of a day's rows, and what is said of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox_pipelines.errors import SetupError
from outbox_pipelines.partitions.calendar import leaf_of
from outbox_pipelines.quality import day_queries, day_rules
from outbox_pipelines.quality.days import DayFacts, measure
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.settings import Settings, load_settings
from tests.archive.days import at, days_ago, make_days, write, write_shapes
from tests.catalog.conftest import CATALOG
from tests.schema.servers import Database

DAY = days_ago(3)
LEAF = leaf_of(DAY)


def settings(database: Database, **more: object) -> Settings:
    return load_settings(dsn=database.dsn, **more)


def facts(database: Database, **more: object) -> DayFacts:
    found = measure(settings(database, **more), DAY)
    assert found is not None
    return found


def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG)
    return path


def past_the_guards(database: Database, statement: str, *values: object) -> None:
    """As an owner who switches them off, or a restore of odd rows, can do."""
    with database.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(sql.SQL(statement).format(leaf=sql.Identifier(LEAF)), values or None)


def test_a_sound_day_has_nothing_to_be_said_of(database: Database) -> None:
    """Guards against a check that cries of days that are fine; and against one that looks at another day."""
    make_days(database, DAY)
    write(database, DAY, [{}, {"event_type": "order.paid", "idempotency_key": "a"}, {"idempotency_key": "b"}])
    write(database, DAY + timedelta(1), [{"payload": Jsonb(1)}])
    found = facts(database)
    assert found == DayFacts(
        events=3,
        types=2,
        first_at=at(DAY),
        last_at=at(DAY, 2_000_002),
        outside=0,
        seqs_twice=0,
        keys_twice=0,
        nameless=0,
        not_objects=0,
        lacking=0,
        unknown_types=0,
        lacking_by_type={},
        unknown_by_type={},
    )
    results = day_rules.judge(found)
    assert set(results.values()) == {Status.OK}
    assert day_rules.summary(found, results) == "3 events, all as expected"


def test_an_empty_day_is_sound(database: Database) -> None:
    """Guards against a check that breaks on sums of nothing."""
    make_days(database, DAY)
    found = facts(database)
    assert (found.events, found.first_at, found.outside) == (0, None, 0)
    assert set(day_rules.judge(found).values()) == {Status.OK}


def test_what_breaks_order_or_days_is_an_error(database: Database) -> None:
    """Guards against rows that cannot be found or put in order, archived without a word."""
    make_days(database, DAY)
    write(database, DAY, [{}, {}])
    past_the_guards(database, "UPDATE {leaf} SET seq = (SELECT min(seq) FROM {leaf})")
    past_the_guards(database, "ALTER TABLE outbox DETACH PARTITION {leaf}")
    past_the_guards(database, "UPDATE {leaf} SET created_at = %s", at(DAY + timedelta(1)))
    found = facts(database)
    assert (found.events, found.seqs_twice, found.outside) == (2, 1, 2)
    results = day_rules.judge(found)
    assert {name for name, status in results.items() if status is Status.ERROR} == {"outside", "seqs_twice"}
    assert day_rules.summary(found, results) == (
        "2 events have a time of another day; 1 numbers (seq) belong to more than one event"
    )


def test_what_a_consumer_stumbles_over_is_a_warning(database: Database) -> None:
    """Guards against odd content that is not reported; each kind is counted separately."""
    make_days(database, DAY)
    write(database, DAY, [{"idempotency_key": "a"}, {"payload": Jsonb([1])}, {"payload": Jsonb(None)}])
    past_the_guards(database, "UPDATE {leaf} SET idempotency_key = 'a' WHERE payload = 'null'")
    found = facts(database)
    assert (found.keys_twice, found.not_objects, found.nameless) == (1, 2, 0)
    results = day_rules.judge(found)
    assert {name: status for name, status in results.items() if status} == dict.fromkeys(
        ("keys_twice", "not_objects"), Status.WARN
    )
    # A tombstone is meant to have none.
    assert facts(database, tombstones=True).not_objects == 1


def test_empty_names_are_counted(database: Database) -> None:
    """Guards against a partition that lost its own check."""
    make_days(database, DAY)
    write(database, DAY, [{}, {}, {}])
    past_the_guards(database, "ALTER TABLE outbox DETACH PARTITION {leaf}")
    past_the_guards(database, "ALTER TABLE {leaf} DROP CONSTRAINT outbox_names_not_empty")
    past_the_guards(database, "UPDATE {leaf} SET aggregate_id = '' WHERE seq > (SELECT min(seq) FROM {leaf})")
    found = facts(database)
    assert found.nameless == 2
    assert day_rules.judge(found)["nameless"] is Status.WARN


def test_the_event_catalog_is_compared(database: Database, tmp_path: Path) -> None:
    """Guards against types and members that the event catalog has but no check compares; and against a schema
    of one type that is applied to another."""
    make_days(database, DAY)
    rows: list[dict[str, object]] = [
        {},
        {"payload": Jsonb({"totals": 5})},
        {"payload": Jsonb(["a list"])},
        {"event_type": "order.shipped", "payload": Jsonb({})},
        {"event_type": "order.lost"},
        {"event_type": "order.lost", "payload": Jsonb({})},
    ]
    write(database, DAY, rows)
    found = facts(database, catalog_file=catalog(tmp_path))
    assert (found.lacking, found.lacking_by_type) == (1, {"order.placed": 1})
    assert (found.unknown_types, found.unknown_by_type) == (1, {"order.lost": 2})
    assert found.not_objects == 1
    without = facts(database)
    assert (without.lacking, without.unknown_types) == (0, 0)


def test_of_many_unknown_types_a_few_are_named(database: Database, tmp_path: Path) -> None:
    """Guards against metadata as large as a day, if an application writes ids into the type."""
    make_days(database, DAY)
    write(database, DAY, [{"event_type": f"order {n}"} for n in range(50)])
    found = facts(database, catalog_file=catalog(tmp_path))
    assert found.unknown_types == 50
    assert len(found.unknown_by_type) == day_queries.MOST_NAMED


def test_odd_rows_are_counted_like_any(database: Database) -> None:
    """Guards against a statement that fails on the last microsecond of a day, or on odd text."""
    make_days(database, DAY)
    written = write_shapes(database, DAY)
    found = facts(database)
    assert (found.events, found.outside, found.seqs_twice) == (len(written), 0, 0)


def test_of_a_dropped_day_nothing_is_said(database: Database) -> None:
    """Guards against a run that fails of a day that is archived and gone."""
    make_days(database, DAY)
    past_the_guards(database, "DROP TABLE {leaf}")
    assert measure(settings(database), DAY) is None
    with pytest.raises(SetupError, match="not a day of the outbox"):
        measure(settings(database), days_ago(300))
