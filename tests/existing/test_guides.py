"""The tables of widely copied guides, relayed as they are: no change to table or writers."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.config.table_mapping import read_mapping
from outbox_pipelines.existing import examine, existing_sql, table_measurements
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay.relay_sql import PLAN_EACH
from tests.conftest import Message, read_topic, wait_until
from tests.existing import guides
from tests.existing.conftest import FEW_GUIDES, Make
from tests.existing.guides import Guide
from tests.existing.textbook import Table
from tests.relay import faults
from tests.relay.topic import create_topic

KEYS = tuple(str(uuid.UUID(int=n)) for n in range(1, 6))


@dataclass(frozen=True)
class Relayed:
    """A guide's table in a database of its own."""

    guide: Guide
    table: Table

    def write(self, *events: tuple[str, str, dict[str, Any]]) -> list[str]:
        """Each in a transaction of its own; the ids."""
        with self.table.connect() as connection:
            writers = self.guide.writers
            return [writers[n % len(writers)](connection, *event) for n, event in enumerate(events)]

    def pending(self) -> int:
        """By the guide's own query."""
        with self.table.connect() as connection:
            row = connection.execute(self.guide.lag.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def messages(self) -> list[Message]:
        kind = "order" if self.guide.name == "C" else "Order"
        return read_topic(self.table.settings.kafka, self.table.outbox.topic(kind))


@pytest.fixture(params=guides.ALL, ids=lambda guide: guide.name)
def relayed(request: pytest.FixtureRequest, make_table: Make) -> Relayed:
    return _relayed(request.param, make_table)


def _relayed(guide: Guide, make_table: Make) -> Relayed:
    table = make_table(guide.ddl, guide.mapping)
    return Relayed(guide, table.with_(**guide.settings))


def _bodies(messages: list[Message]) -> dict[str, list[int]]:
    """By key, the numbers in the bodies."""
    found = defaultdict(list)
    for message in messages:
        value = json.loads(message.value or "")
        found[message.key].append(value.get("payload", value)["n"])
    return dict(found)


def test_a_guides_table_is_relayed_as_it_is(relayed: Relayed) -> None:
    """Guards against a newcomer whose table is refused, or whose events come in another order."""
    events = [(KEYS[n % 5], "order.created", {"n": n}) for n in range(100)]
    ids = relayed.write(*events)
    assert relayed.pending() == 100
    assert relayed.table.drain().events == 100
    assert relayed.pending() == 0
    messages = relayed.messages()
    assert {message.headers["id"] for message in messages} == set(ids)
    assert {message.headers["event-type"] for message in messages} == {"order.created"}
    assert _bodies(messages) == {key: list(range(n, 100, 5)) for n, key in enumerate(KEYS)}
    assert table_measurements.read(relayed.table.settings).warnings == _warnings(relayed.guide)
    # Nothing is published again.
    assert relayed.table.drain().events == 0


def _warnings(guide: Guide) -> list[str]:
    return {
        "C": [
            "column 'status' of outbox_events allows NULL; such a row is never published: "
            'ALTER TABLE public.outbox_events ALTER COLUMN "status" SET NOT NULL'
        ],
        "E": [
            "outbox has no failed_at and no last_error that record dead letters: each is tried again after "
            "every restart: name the column in [table.columns], if necessary after ALTER TABLE public.outbox "
            "ADD COLUMN failed_at timestamptz"
        ],
    }.get(guide.name, [])


@pytest.mark.extended
@pytest.mark.parametrize("relayed", FEW_GUIDES, indirect=True, ids=lambda guide: guide.name)
def test_a_relay_takes_what_comes(relayed: Relayed) -> None:
    """Guards against rows that are claimed once and then forgotten."""
    with relayed.table.relayed():
        for n in range(20):
            relayed.write((KEYS[0], "order.created", {"n": n}))
            wait_until(lambda: relayed.pending() == 0, what="everything published")
    assert _bodies(relayed.messages()) == {KEYS[0]: list(range(20))}


def test_the_rows_of_one_transaction_are_in_the_order_of_their_ids(make_table: Make) -> None:
    """What `guarantees.md` says: equal times are ordered by the id."""
    relayed = _relayed(guides.E, make_table)
    with relayed.table.connect(autocommit=False) as connection:
        ids = [guides.E.writers[0](connection, KEYS[0], "order.created", {"n": n}) for n in range(30)]
    relayed.table.drain()
    assert [message.headers["id"] for message in relayed.messages()] == sorted(ids)


@pytest.mark.extended
def test_a_refused_event_waits_with_its_aggregate(make_table: Make) -> None:
    """Guards against rows without a number that are marked or counted in place of others."""
    relayed = _relayed(guides.D, make_table)
    relayed = Relayed(relayed.guide, relayed.table.with_(max_attempts=2, retry_seconds=0.05))
    create_topic(relayed.table.outbox, of="Order", **{"max.message.bytes": "3000"})
    bad = KEYS[1]
    good = [(key, "order.created", {"n": n}) for n, key in enumerate((KEYS[0], KEYS[2]) * 10)]
    first = relayed.write(
        (bad, "order.created", {"n": 0, "text": _noise()}), (bad, "order.created", {"n": 1})
    )
    relayed.write(*good)
    with relayed.table.relayed():
        wait_until(lambda: relayed.pending() == 1, what="all others published")
    assert _bodies(relayed.messages()) == {
        KEYS[0]: list(range(0, 20, 2)),
        KEYS[2]: list(range(1, 20, 2)),
        bad: [1],
    }
    with relayed.table.connect() as connection:
        rows = connection.execute(
            "SELECT id::text, retry_count, last_error FROM outbox WHERE published_at IS NULL"
        ).fetchall()
    assert [(event_id, count) for event_id, count, _ in rows] == [(first[0], 2)]
    assert "larger than" in rows[0][2]


def _noise() -> str:
    return "".join(uuid.uuid4().hex for _ in range(400))


@pytest.mark.extended
def test_a_dead_letter_of_a_table_without_attempts_holds_nothing_back(make_table: Make) -> None:
    """Guards against a loop: the table of guide E has no column for refusals."""
    relayed = _relayed(guides.E, make_table)
    relayed = Relayed(relayed.guide, relayed.table.with_(max_attempts=2, retry_seconds=0.05))
    create_topic(relayed.table.outbox, of="Order", **{"max.message.bytes": "3000"})
    relayed.write(
        (KEYS[0], "order.created", {"n": 0, "text": _noise()}), (KEYS[0], "order.created", {"n": 1})
    )
    with relayed.table.relayed():
        wait_until(lambda: relayed.pending() == 1, what="the event after the dead letter")
        relayed.write((KEYS[0], "order.created", {"n": 2}))
        wait_until(lambda: relayed.pending() == 1, what="a later event")
    assert _bodies(relayed.messages()) == {KEYS[0]: [1, 2]}


def test_large_and_unreadable_rows(make_table: Make) -> None:
    """Guards against rows that are read by number where only an id identifies them."""
    relayed = _relayed(guides.D, make_table)
    text = "x" * 100_000
    relayed.write(*((KEYS[n % 3], "order.created", {"n": n, "text": text}) for n in range(30)))
    with relayed.table.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
            "VALUES (gen_random_uuid(), 'Order', 'huge', 'order.created', "
            "to_jsonb(repeat('x', 9000000)), now())"
        )
    assert relayed.table.drain().unpublished == 1
    assert _bodies(relayed.messages()) == {KEYS[n]: list(range(n, 30, 3)) for n in range(3)}
    with relayed.table.connect() as connection:
        [(error,)] = connection.execute("SELECT last_error FROM outbox WHERE published_at IS NULL").fetchall()
    assert "more than 8,000,000 bytes" in error


def test_ids_of_any_text(make_table: Make) -> None:
    """Guards against an id that ends a statement's list of ids."""
    ddl = guides.D.ddl.replace("id uuid PRIMARY KEY", "id varchar(2000) PRIMARY KEY")
    table = make_table(ddl, guides.D.mapping)
    ids = ['a"b', "a\\", "{a,b}", "", "NULL", "ü'", "x" * 1500, "a\nb"]
    with table.connect() as connection:
        for event_id in ids:
            connection.execute(
                "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
                "VALUES (%s, 'Order', '1', 'order.created', '{}', now())",
                [event_id],
            )
    assert table.drain().events == len(ids)
    found = [message.headers["id"] for message in Relayed(guides.D, table).messages()]
    assert sorted(map(str, found)) == sorted(ids)
    assert table.drain().events == 0


def test_rows_without_a_time_are_relayed_last(make_table: Make) -> None:
    """Guards against a row that no claim finds: the column of guide A may be null."""
    relayed = _relayed(guides.A, make_table)
    relayed.write(*((KEYS[0], "order.created", {"n": n}) for n in range(3)))
    with relayed.table.connect() as connection:
        connection.execute("UPDATE outbox SET created_at = NULL WHERE payload ->> 'n' = '0'")
    assert relayed.table.drain().events == 3
    assert _bodies(relayed.messages()) == {KEYS[0]: [1, 2, 0]}


def test_a_run_until_empty_ends_beside_a_writer(make_table: Make) -> None:
    """Guards against a run that follows a writer for ever."""
    relayed = _relayed(guides.D, make_table)
    relayed.write(*((KEYS[n % 3], "order.created", {"n": n}) for n in range(50)))
    with psycopg.connect(relayed.table.settings.dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION more() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
            "VALUES (gen_random_uuid(), 'Order', 'more', 'order.created', '{}', clock_timestamp()); "
            "RETURN NULL; END $$; "
            "CREATE TRIGGER more AFTER UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION more()"
        )
    assert relayed.table.drain().events == 50
    assert relayed.pending() > 0


@pytest.mark.extended
@pytest.mark.parametrize("guide", [guides.C, guides.D], ids=lambda guide: guide.name)
def test_no_statement_reads_the_whole_table(guide: Guide, make_table: Make, tmp_path: Path) -> None:
    """Guards against a table of published rows that slows down each claim and each mark.

    The statistics are those of a table without pending rows, as after a quiet night.
    """
    relayed = _relayed(guide, make_table)
    table = "outbox_events" if guide is guides.C else "outbox"
    with relayed.table.connect() as connection:
        _fill(connection, guide, 60_000)
        done = "status = 'PROCESSED'" if guide is guides.C else "published_at = now()"
        connection.execute(f"UPDATE {table} SET {done}".encode())
        connection.execute(f"VACUUM ANALYZE {table}".encode())
        _fill(connection, guide, 3_000)
        mapping = read_mapping(tomllib.loads(guide.mapping))
        statements = Statements(
            mapping, examine.check(connection, mapping).types, max_attempts=5, with_time=False
        )
        connection.execute(PLAN_EACH)
        last = connection.execute(f"SELECT id::text FROM {table} ORDER BY created_at DESC LIMIT 100".encode())
        numbers = [statements.keys.number(key) for (key,) in last.fetchall()]
        few = statements.keys.array(numbers)
        claim = statements(existing_sql.CLAIM, existing_sql.NOT_BUSY)
        count = len(numbers)
        given = {
            **{"keys": few, "numbers": numbers, "seqs": numbers, "busy": few},
            **{"errors": ["x"] * count, "pauses": [0.0] * count, "lasts": [False] * count},
            **{"limit": count, "most": 8000},
        }
        for statement in (
            claim[claim.index(b"SELECT") :],
            statements(existing_sql.ANY, existing_sql.NOT_BUSY),
            statements(existing_sql.LOCKED, existing_sql.NOT_BUSY),
            statements(existing_sql.MARK),
            statements(existing_sql.UNMARKED),
            statements(existing_sql.EVENTS),
            statements(existing_sql.REFUSED),
        ):
            plan = connection.execute(b"EXPLAIN " + statement, given).fetchall()
            assert not [line for (line,) in plan if "Seq Scan" in line], plan


def _fill(connection: psycopg.Connection[Any], guide: Guide, rows: int) -> None:
    insert = (
        "INSERT INTO outbox_events (aggregate_id, event_type, event_data) "
        "SELECT n::text, 'order.created', '{}'"
        if guide is guides.C
        else "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
        "SELECT gen_random_uuid(), 'Order', n::text, 'order.created', '{}', clock_timestamp()"
    )
    connection.execute(f"{insert} FROM generate_series(1, {rows}) AS n".encode())


@pytest.mark.extended
@pytest.mark.parametrize("relayed", FEW_GUIDES, indirect=True, ids=lambda guide: guide.name)
def test_a_relay_that_was_killed_loses_nothing(relayed: Relayed) -> None:
    """Guards G1: numbers mean nothing to the next process, so it must find the rows by what they are."""
    relayed.write(*((KEYS[n % 5], "order.created", {"n": n}) for n in range(200)))
    environment = {
        "OUTBOX_TABLE": json.dumps(relayed.table.settings.table),
        "OUTBOX_VALUE_FORMAT": relayed.table.settings.value_format,
        "OUTBOX_BATCH_EVENTS": "20",
    }
    for _ in range(3):
        with faults.relay(relayed.table.outbox, **environment) as process:
            wait_until(lambda: relayed.pending() < 200, what="a claim settled")
            relayed.write((KEYS[0], "order.created", {"n": 1000}))
            process.kill()
            process.wait()
    relayed.table.drain()
    assert relayed.pending() == 0
    seen = _bodies(relayed.messages())
    for n, key in enumerate(KEYS):
        first: list[int] = list(dict.fromkeys(seen[key]))
        assert [number for number in first if number < 1000] == list(range(n, 200, 5))
