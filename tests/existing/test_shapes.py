"""Both textbook shapes from the table to the topic, and what the table contains afterwards."""

from __future__ import annotations

import json
import uuid

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import table_measurements
from tests.conftest import may_log_in, wait_until
from tests.existing import textbook
from tests.existing.conftest import Make
from tests.existing.textbook import Table

_PARTITIONED = (
    textbook.PUBLISHED_AT.replace(
        "published_at timestamptz);", "published_at timestamptz) PARTITION BY RANGE (created_at);"
    )
    .replace("UNIQUE INDEX", "INDEX")
    .replace("GENERATED ALWAYS AS IDENTITY", "NOT NULL DEFAULT nextval('s')")
)
PARTITIONED = f"""
CREATE SEQUENCE s;
{_PARTITIONED};
CREATE TABLE events_past PARTITION OF events FOR VALUES FROM (MINVALUE) TO ('2020-01-01');
CREATE TABLE events_now PARTITION OF events FOR VALUES FROM ('2020-01-01') TO (MAXVALUE)"""


def test_a_row_arrives_with_key_value_and_headers(table: Table) -> None:
    """Guards against a message that a consumer cannot use, or a row that is not marked."""
    with table.connect() as connection:
        row = connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, headers, correlation_id) "
            "VALUES ('order', '42', 'order.placed', '{\"total\": 1.10}', '{\"tenant\": \"eu\"}', 'c-1') "
            "RETURNING id::text"
        ).fetchone()
    assert row is not None
    assert table.drain().events == 1
    (message,) = table.messages()
    assert (message.key, message.value) == ("42", '{"total": 1.10}')
    assert message.headers == {
        "id": row[0],
        "event-type": "order.placed",
        "aggregate-type": "order",
        "correlation-id": "c-1",
        "tenant": "eu",
    }
    assert table.rows("published_at > created_at, retry_count") == [(True, 0)]
    assert table.drain().events == 0


def test_status_and_names_of_its_own(make_table: Make) -> None:
    """Guards against names, types or words that are ours and not the table's."""
    table = make_table(textbook.STATUS, textbook.STATUS_MAPPING)
    entity = str(uuid.uuid4())
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO events (kind, entity, name, body) VALUES ('order', %s, 'placed', %s)",
            [entity, '{"n": 1}'],
        )
        table.drain(value_format="envelope")
        row = connection.execute(
            "SELECT state::text, sent_at >= made_at AND sent_at <= now() AT TIME ZONE 'UTC', tries "
            "FROM events"
        ).fetchone()
    assert row == ("sent", True, None)
    (message,) = table.messages()
    assert message.key == entity
    envelope = json.loads(message.value or "")
    assert (envelope["event_id"], envelope["payload"]) == ("1", {"n": 1})


def test_status_tells_what_was_refused(make_table: Make) -> None:
    """Guards against a rejection that is counted in the wrong column, or never ends."""
    table = make_table(textbook.STATUS, textbook.STATUS_MAPPING)
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO events (kind, entity, name, body) SELECT kind, gen_random_uuid(), 'placed', '1' "
            "FROM unnest(ARRAY['or/der', 'order']) kind"
        )
        query = b"SELECT state::text, tries, problem, retry_at > made_at, broken_at > made_at FROM events"
        with table.relayed(max_attempts=2, retry_seconds=60):
            first = ("new", 1, "outbox: IllegalTopic", True, None)
            wait_until(lambda: sorted(connection.execute(query))[0] == first, what="the first attempt")
        connection.execute("UPDATE events SET retry_at = NULL")
        table.drain(max_attempts=2)
        assert sorted(connection.execute(query)) == [
            ("broken", 2, "outbox: IllegalTopic", None, True),
            ("sent", None, None, None, None),
        ]


def test_a_partitioned_table(make_table: Make) -> None:
    """Guards against rows of one partition that are passed over or not marked."""
    table = make_table(PARTITIONED, textbook.PUBLISHED_AT_MAPPING)
    table.fill(1000, aggregates=3)
    with table.connect() as connection:
        connection.execute("UPDATE events SET created_at = '2019-01-01' WHERE seq % 3 = 1")
    assert table.drain().events == 1000
    assert table.pending() == []
    for key in range(3):
        assert table.numbers(str(key)) == [n for n in range(1, 1001) if n % 3 == key]


def test_the_least_that_a_table_must_have(make_table: Make) -> None:
    """Guards against a need for columns that textbooks do not have; a dead letter is then passed over."""
    table = make_table(
        "CREATE TABLE events (id serial PRIMARY KEY, aggregate_type text NOT NULL, "
        "aggregate_id int NOT NULL, event_type text NOT NULL, payload json, published_at timestamp)",
        'name = "events"\n[columns]\nseq = "id"\npublished_at = "published_at"',
    )
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload) VALUES "
            "('or/der', 1, 'placed', '1'), ('order', 2, 'placed', NULL), ('order', 1, 'placed', '2')"
        )
        totals = table.drain(max_attempts=1)
        assert (totals.events, totals.unpublished) == (2, 1)
        assert [(message.key, message.value) for message in table.messages()] in (
            [("2", "null"), ("1", "2")],
            [("1", "2"), ("2", "null")],
        )
        rows = connection.execute("SELECT published_at IS NULL FROM events ORDER BY id").fetchall()
    assert rows == [(True,), (False,), (False,)]


def test_one_aggregate_arrives_in_order(table: Table) -> None:
    """Guards against reordering between claims, and against rows marked that were not sent."""
    table.fill(12_000, aggregates=7)
    assert table.drain(batch_events=1000).events == 12_000
    assert table.pending() == []
    for key in range(7):
        assert table.numbers(str(key)) == [n for n in range(1, 12_001) if n % 7 == key]


def test_large_payloads_are_claimed_a_few_at_a_time(table: Table) -> None:
    """Guards against a relay that reads gigabytes into memory at once."""
    table.write(*[(str(n), {"n": n, "padding": "x" * 50_000}) for n in range(200)])
    with table.relayed(batch_bytes=1_000_000):
        wait_until(lambda: not table.pending(), seconds=60, what="all rows to be marked")
    assert len(table.messages()) == 200


def test_a_running_relay_publishes_what_commits_and_stops_on_request(table: Table) -> None:
    """Guards against a relay that needs a restart to see new rows, or loses some at a stop."""
    with table.relayed():
        for n in range(20):
            table.write((str(n), {"n": n}))
            wait_until(lambda: not table.pending(), what="the row to be marked")
    assert table.pending() == []
    assert len(table.messages()) == 20


def test_a_row_corrected_by_hand_is_published_again(table: Table) -> None:
    """Guards against dead letters that an operator cannot bring back."""
    with table.connect() as connection:
        seq = textbook.insert(connection, "a", {"n": 1})
        connection.execute("UPDATE events SET aggregate_type = 'or/der'")
        table.drain(max_attempts=1)
        assert table.rows("published_at, retry_count") == [(None, 1)]
        assert table.drain(max_attempts=1).events == 0
        connection.execute(
            "UPDATE events SET aggregate_type = 'order', retry_count = 0 WHERE seq = %s", [seq]
        )
    assert table.drain(max_attempts=1).events == 1
    assert table.numbers("a") == [1]


def test_the_role_needs_select_and_update_alone(table: Table) -> None:
    """Guards against a relay that must own the table or have tables of its own."""
    import psycopg

    role = f"relay_{uuid.uuid4().hex[:8]}"
    with table.connect() as connection:
        connection.execute(f"CREATE ROLE {role} {may_log_in(table.settings.dsn)}".encode())
        try:
            modest = table.with_(dsn=psycopg.conninfo.make_conninfo(table.settings.dsn, user=role))
            with pytest.raises(SetupError, match=f"GRANT SELECT, UPDATE ON public.events TO {role}"):
                modest.drain()
            connection.execute(f"GRANT SELECT, UPDATE ON events TO {role}".encode())
            table.write(("a", {"n": 1}))
            assert modest.drain().events == 1
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_rows_that_an_envelope_cannot_have(make_table: Make) -> None:
    """Guards against a message that is not JSON, a reason that is a traceback's, and an infinite age."""
    ddl = textbook.PUBLISHED_AT.replace("payload jsonb", "payload text")
    table = make_table(ddl, textbook.PUBLISHED_AT_MAPPING).with_(value_format="envelope", retry_seconds=60.0)
    with table.connect() as connection:
        for key, payload, at in (("a", "{oops", "now"), ("b", '{"n": 1}', "now"), ("c", "1", "infinity")):
            connection.execute(
                "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, created_at) "
                "VALUES ('order', %s, 'e', %s, %s::timestamptz)",
                [key, payload, at],
            )
    assert table.drain().events == 1
    assert [json.loads(message.value or "")["payload"] for message in table.messages()] == [{"n": 1}]
    reasons = dict(table.rows("aggregate_id, last_error"))
    assert "invalid input syntax for type json" in reasons["a"]
    assert "needs created_at, and the row has no time in it" in reasons["c"]
    found = table_measurements.read(table.settings)
    assert (found.dead_letters, found.unpublished, found.oldest_unpublished_seconds) == (1, 1, 0)


def test_unreadable_rows_become_dead_letters_and_the_others_go_on(make_table: Make) -> None:
    """Guards against a `json` column that PostgreSQL cannot convert: it ended the relay at each start."""
    ddl = textbook.PUBLISHED_AT.replace("headers jsonb", "headers json")
    table = make_table(ddl, textbook.PUBLISHED_AT_MAPPING)
    cannot = {
        "nul": ('{"a": "\\u0000"}', 1),
        "surrogate": ('{"a": "\\ud800"}', 1),
        "number": ('{"a": 1e999999}', 1),
        "large": (None, 20_000_000),
    }
    with table.connect() as connection:
        for key, (headers, characters) in cannot.items():
            for name, given, length in ((key, headers, characters), (key, None, 1), ("good", None, 1)):
                connection.execute(
                    "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, headers, "
                    "correlation_id) VALUES ('order', %s, 'e', '1', %s::json, repeat('x', %s))",
                    [name, given, length],
                )
        file = {"OUTBOX_TABLE": json.dumps(table.settings.table)}
        drained = table.outbox.outbox("relay", "--until-empty", **file)
        assert drained.returncode == 1, drained.stderr
        rows = connection.execute(
            "SELECT aggregate_id, last_error FROM events WHERE published_at IS NULL"
        ).fetchall()
    assert {row[0] for row in rows} == set(cannot)
    assert all("read" in row[1] for row in rows)
    # A line for those that are alike.
    assert 1 <= drained.stderr.count("dead letter: event") <= len(cannot)
