"""`outbox table check`: everything that is to be corrected, with statements that do it."""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import check, describe, table_measurements
from tests.conftest import may_log_in, wait_until
from tests.existing import guides, textbook
from tests.existing.conftest import Make
from tests.existing.test_shapes import PARTITIONED
from tests.existing.textbook import Table


def _run(table: Table, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return table.outbox.outbox("table", "check", *arguments, **table.environment | environment)


def _findings(table: Table) -> list[dict[str, Any]]:
    done = _run(table, "--json")
    assert done.stderr == ""
    content = json.loads(done.stdout)
    assert (done.returncode == 1) == any(each["severity"] == "error" for each in content["findings"])
    return list(content["findings"])


def _correct(table: Table) -> list[str]:
    """Runs what is printed, line by line, as a person would; the statements."""
    lines = [line.strip() for line in _run(table).stdout.splitlines() if line.startswith("    ")]
    for line in lines:
        assert line.endswith(";")
        # Not in the relay's schema.
        with psycopg.connect(table.settings.dsn, autocommit=True, options="-c search_path=") as connection:
            connection.execute(line.encode())
    return lines


def _clean_after_statements(table: Table) -> list[str]:
    lines = _correct(table)
    description = table.settings.table
    if "last_error" not in description["columns"]:
        # The column that one of the statements has added.
        columns = {**description["columns"], "last_error": "last_error"}
        table = table.with_(table={**description, "columns": columns})
    assert _findings(table) == []
    done = _run(table)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{_name(table)}: nothing to correct"])
    return lines


def _name(table: Table) -> str:
    return str(check.open_mapping(table.settings))


def _change(table: Table, statements: str) -> None:
    with table.connect() as connection:
        connection.execute(statements.encode())


def test_a_table_with_nothing_to_correct(table: Table) -> None:
    assert _clean_after_statements(table) == []


@pytest.mark.parametrize(
    ("change", "severity", "statement"),
    [
        (
            # Beside indexes that do not help.
            "DROP INDEX events_seq_idx; CREATE INDEX ON events (id) WHERE published_at IS NULL; "
            "CREATE INDEX ON events (seq) WHERE headers IS NULL; CREATE INDEX ON events (published_at, seq); "
            "CREATE INDEX ON events (seq) WHERE published_at IS NOT NULL; "
            "CREATE TABLE other (a int, seq int)",
            "warning",
            'CREATE INDEX CONCURRENTLY ON public.events ("seq") WHERE',
        ),
        ("ALTER TABLE events DROP headers", "error", 'ADD COLUMN "headers" jsonb'),
        ("ALTER TABLE events DROP id", "error", 'ADD COLUMN "id" uuid NOT NULL DEFAULT gen_random_uuid()'),
        ("ALTER TABLE events DROP retry_count", "error", 'ADD COLUMN "retry_count" int NOT NULL DEFAULT 0'),
        (
            "ALTER TABLE events DROP created_at",
            "error",
            'ADD COLUMN "created_at" timestamptz NOT NULL DEFAULT',
        ),
        ("ALTER TABLE events DROP seq", "error", 'ADD COLUMN "seq" bigserial'),
        ("ALTER TABLE events DROP published_at", "error", 'ADD COLUMN "published_at" timestamptz'),
        (
            "CREATE SEQUENCE s START 11; ALTER TABLE events ALTER seq DROP IDENTITY, "
            "ALTER seq DROP NOT NULL, ALTER seq SET DEFAULT nextval('s')",
            "error",
            'ALTER COLUMN "seq" SET NOT NULL',
        ),
        ("ALTER TABLE events ALTER aggregate_id DROP NOT NULL", "warning", '"aggregate_id" SET NOT NULL'),
        (
            "DROP INDEX events_seq_idx; ALTER TABLE events ALTER seq DROP IDENTITY; "
            "CREATE SEQUENCE s START 11; "
            "CREATE FUNCTION f() RETURNS bigint LANGUAGE sql AS $$ SELECT nextval('public.s') $$; "
            "ALTER TABLE events ALTER seq SET DEFAULT f()",
            "warning",
            'CREATE UNIQUE INDEX CONCURRENTLY ON public.events ("seq")',
        ),
        ("ALTER TABLE events ALTER id DROP NOT NULL", "warning", '"id" SET NOT NULL'),
        (
            "ALTER TABLE events ALTER next_attempt_at TYPE text",
            "error",
            'TYPE timestamptz USING "next_attempt_at"::',
        ),
        (
            "ALTER TABLE events ALTER aggregate_id TYPE jsonb USING '{}'",
            "error",
            'TYPE text USING "aggregate_id"::',
        ),
    ],
)
def test_each_statement_corrects_what_it_is_printed_for(
    table: Table, change: str, severity: str, statement: str
) -> None:
    """Guards against advice that does not run, or does not help."""
    table.fill(10)
    _change(table, change)
    (first, *others) = _findings(table)
    assert first["severity"] == severity
    assert statement in first["statements"][0]
    assert {each["severity"] for each in others} <= {"warning"}
    assert _clean_after_statements(table)
    table.fill(10)
    table.drain()


def test_all_problems_are_reported_at_once(table: Table) -> None:
    """Guards against a user who corrects one problem after the other, each at a new start."""
    change = """
ALTER TABLE events DROP headers, DROP last_error, ALTER event_type DROP NOT NULL,
    ALTER correlation_id TYPE jsonb USING NULL, ALTER next_attempt_at TYPE text;
DROP INDEX events_seq_idx"""
    _change(table, change)
    found = [(each["severity"], each["text"]) for each in _findings(table)]
    assert [severity for severity, _ in found] == ["warning", "error", "error", "error", "error", "warning"]
    text = "\n".join(text for _, text in found)
    for name in ("event_type", "headers", "last_error", "correlation_id", "next_attempt_at", "index over"):
        assert name in text
    with pytest.raises(SetupError, match="no column 'headers'"):
        table.drain()
    assert len(_clean_after_statements(table)) == 6


def test_each_partition_gets_its_index(make_table: Make) -> None:
    """Guards against CREATE INDEX CONCURRENTLY on a partitioned table, which PostgreSQL refuses."""
    bounds = "FOR VALUES FROM (MINVALUE) TO ('2020-01-01')"
    nested = f"{bounds} PARTITION BY RANGE (created_at); CREATE TABLE events_nested PARTITION OF events_past "
    table = make_table(PARTITIONED.replace(bounds, nested + bounds), textbook.PUBLISHED_AT_MAPPING)
    _change(table, "DROP INDEX events_seq_idx")
    statements = _clean_after_statements(table)
    assert [re.findall(r"ON (\S+)", statement) for statement in statements] == [
        ["public.events_now"],
        ["public.events_nested"],
    ]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ("FROM ('2020-01-01') TO ('2021-01-01')", "ended on 2021-01-01 00:00 UTC"),
        ("FROM ('2020-01-01') TO ('{in_6_days}')", "ends on 20"),
        ("FROM ('2020-01-01') TO ('{in_9_days}')", ""),
        ("FROM ('2020-01-01') TO (MAXVALUE)", ""),
        ("FROM ('2020-01-01') TO ('infinity')", ""),
        ("DEFAULT", ""),
    ],
)
def test_the_newest_partition_ends(make_table: Make, bounds: str, words: str) -> None:
    """Guards against writers that are refused on the first of the month, without a report."""
    bounds = bounds if bounds == "DEFAULT" else f"FOR VALUES {bounds}"
    days = {f"in_{n}_days": f"{datetime.now(UTC) + timedelta(days=n):%Y-%m-%d}" for n in (6, 9)}
    bounds = bounds.format(**days)
    table = make_table(
        PARTITIONED.replace("FOR VALUES FROM ('2020-01-01') TO (MAXVALUE)", bounds),
        textbook.PUBLISHED_AT_MAPPING,
    )
    # Of another table.
    _change(
        table,
        "CREATE TABLE other (at timestamptz) PARTITION BY RANGE (at); "
        "CREATE TABLE other_past PARTITION OF other FOR VALUES FROM ('2019-01-01') TO ('2019-02-01')",
    )
    said = [finding["text"] for finding in _findings(table) if "newest partition" in finding["text"]]
    assert len(said) == bool(words)
    assert all(words in text and "OUTBOX_MONTHS_AHEAD" in text for text in said)


def test_a_table_in_another_schema_with_names_to_quote(make_table: Make) -> None:
    """Guards against statements that only a plain name in public survives."""
    ddl = """
CREATE SCHEMA "My App";
CREATE TABLE "My App"."Out box" (
    "Id" uuid NOT NULL, "Seq" bigserial NOT NULL, "Type" text, "Key" text NOT NULL, "Event" text NOT NULL,
    "Body" json, "Made" timestamptz NOT NULL DEFAULT now(), "When" timestamptz)"""
    mapping = """
name = "My App.Out box"
[columns]
id = "Id"
seq = "Seq"
aggregate_type = "Type"
aggregate_id = "Key"
event_type = "Event"
payload = "Body"
created_at = "Made"
published_at = "When"
failed_at = "Dead \\"at\\""
retry_count = "Tries"
"""
    statements = _clean_after_statements(make_table(ddl, mapping))
    assert len(statements) == 5


def test_values_that_a_status_cannot_have(make_table: Make) -> None:
    """Guards against a dead letter that the table refuses on its day."""
    ddl = textbook.STATUS.replace("'broken'", "'bad'")
    table = make_table(ddl, textbook.STATUS_MAPPING)
    assert _clean_after_statements(table) == ["ALTER TYPE public.event_state ADD VALUE 'broken';"]


def test_values_that_a_check_does_not_allow(make_table: Make) -> None:
    """Guards against a CHECK that refuses the first dead letter, or the first mark."""
    ddl = guides.C.ddl.replace(
        "status varchar(50)",
        "status varchar(50) NOT NULL CONSTRAINT \"known states\" CHECK (status IN ('PENDING', 'SENT'))",
    )
    table = make_table(ddl, guides.C.mapping)
    finding, _ = _findings(table)
    assert finding["text"].startswith(
        "constraint known states does not allow 'PROCESSED', 'FAILED' in column 'status' of outbox_events: "
    )
    with pytest.raises(SetupError, match=r"write processed, failed in \[table.status\] with allowed values"):
        table.drain()
    assert len(_clean_after_statements(table)) == 2


def test_rows_that_another_publisher_left_and_times_of_another_zone(make_table: Make) -> None:
    """Guards against events that are never published, and an age of hours, that nothing explains."""
    table = make_table(guides.C.ddl, guides.C.mapping)
    values = "('1', 'order.created', '{}', 'PROCESSING'), ('1', 'order.created', '{}', 'PENDING')"
    _change(
        table, f"INSERT INTO outbox_events (aggregate_id, event_type, event_data, status) VALUES {values}"
    )
    usual = _findings(table)
    database = psycopg.conninfo.conninfo_to_dict(table.settings.dsn)["dbname"]
    _change(table, f"ALTER DATABASE \"{database}\" SET timezone = 'Asia/Kolkata'")
    try:
        zoned = [each for each in _findings(table) if each not in usual]
    finally:
        _change(table, f'ALTER DATABASE "{database}" RESET timezone')
    (left,) = (each for each in usual if "'PROCESSING', and are not published" in each["text"])
    assert [each["text"].partition(":")[0] for each in zoned] == [
        "column 'created_at' of outbox_events has no time zone, and its default is the time in Asia/Kolkata; "
        "the relay reads it as UTC, so that the age of events is wrong by the difference"
    ]
    for statement in (*left["statements"], *zoned[0]["statements"]):
        _change(table, statement)
    assert _findings(table) == [each for each in usual if each is not left]


def test_rights(make_table: Make) -> None:
    """Guards against a relay that finds out which right it lacks one by one."""
    ddl = "CREATE SCHEMA app; " + textbook.PUBLISHED_AT.replace("TABLE events", "TABLE app.events").replace(
        "ON events", "ON app.events"
    )
    table = make_table(ddl, textbook.PUBLISHED_AT_MAPPING.replace("public.", "app."))
    role = f"Relay {uuid.uuid4().hex[:8]}"
    _change(table, f'CREATE ROLE "{role}" {may_log_in(table.settings.dsn)}')
    try:
        dsn = psycopg.conninfo.make_conninfo(table.settings.dsn, user=role)
        modest = table.with_(dsn=dsn)
        _change(table, "ALTER TABLE app.events ENABLE ROW LEVEL SECURITY, DROP headers")
        found = [
            each["statements"]
            for each in json.loads(_run(modest, "--json", OUTBOX_DSN=dsn).stdout)["findings"]
        ]
        assert [statement for (statement,) in found] == [
            f'GRANT USAGE ON SCHEMA "app" TO "{role}"',
            f'GRANT SELECT, UPDATE ON app.events TO "{role}"',
            f'ALTER ROLE "{role}" BYPASSRLS',
            'ALTER TABLE app.events ADD COLUMN "headers" jsonb',
        ]
        for (statement,) in found:
            _change(table, statement)
        assert _run(modest, OUTBOX_DSN=dsn).stdout == "app.events: nothing to correct\n"
        _change(
            table,
            f'REVOKE UPDATE ON app.events FROM "{role}"; '
            f'GRANT UPDATE (retry_count) ON app.events TO "{role}"',
        )
        (finding,) = json.loads(_run(modest, "--json", OUTBOX_DSN=dsn).stdout)["findings"]
        _change(table, *finding["statements"])
        assert _run(modest, OUTBOX_DSN=dsn).stdout == "app.events: nothing to correct\n"
    finally:
        _change(table, f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.mark.parametrize(
    ("ddl", "name", "message"),
    [
        (guides.E.ddl, "outbox_new", "public.outbox_new is a partition: name its parent, public.outbox"),
        (
            guides.E.ddl,
            "outbox_new_pkey",
            "public.outbox_new_pkey is not a table but an index: name the table",
        ),
        ("CREATE VIEW v AS SELECT 1", "v", "public.v is not a table but a view: name the table that has the"),
        ("CREATE SCHEMA app; CREATE TABLE app.box ()", "box", "table box does not exist .*there is app.box"),
        ("", "nothing", "table nothing does not exist .*correct `name` in .table.; write"),
    ],
)
def test_what_is_no_table(make_table: Make, ddl: str, name: str, message: str) -> None:
    """Guards against half a table that is published as if it were all, and against a traceback."""
    table = make_table(ddl or "SELECT 1", guides.E.mapping.replace('"outbox"', f'"{name}"'))
    (finding,) = _findings(table)
    assert finding["severity"] == "error"
    assert re.search(message, finding["text"])
    for refuses in (table.drain, lambda: table_measurements.read(table.settings)):
        with pytest.raises(SetupError, match=message) as raised:
            refuses()
        assert "\n" not in str(raised.value)


def test_a_table_without_any_order(make_table: Make) -> None:
    """Guards against advice to order rows by a time that the table does not have."""
    ddl = (
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregate_type text NOT NULL, aggregate_id text NOT NULL, "
        "event_type text NOT NULL, payload jsonb)"
    )
    table = make_table(ddl, guides.D.mapping.replace('order = "created_at"', ""))
    found = {each["text"].partition(":")[0]: each["text"] for each in _findings(table)}
    assert "created_at" not in found["outbox has no column 'seq'"]
    assert "(all rows are pending in a new one)" in found["outbox has no column 'published_at'"]
    _correct(table)
    (finding,) = _findings(table)
    assert finding["text"].startswith("outbox has no created_at in [table.columns]; the check lag cannot")


_OF_TENANTS = """
CREATE TABLE ck (
    tenant int, id text, seq bigserial UNIQUE NOT NULL,
    aggregate_type text NOT NULL, aggregate_id text NOT NULL,
    event_type text NOT NULL, payload jsonb, published_at timestamptz, PRIMARY KEY (tenant, id))"""


def test_an_id_that_repeats_is_reported(make_table: Make) -> None:
    """Guards against consumers that leave out events, because another one has the same id."""
    table = make_table(_OF_TENANTS, guides.D.mapping)
    description = describe.describe(table.settings, "ck")
    assert 'id = "id"' in description.text
    assert "NOT unique on its own" in description.text
    table = table.described(description.text)
    (finding, *_) = _findings(table)
    assert finding["severity"] == "warning"
    assert "column 'id' of ck (id) is not unique on its own" in finding["text"]
    assert finding["statements"] == ['CREATE UNIQUE INDEX CONCURRENTLY ON public.ck ("id")']
    _change(table, "ALTER TABLE ck ALTER id TYPE uuid USING gen_random_uuid()")
    assert "not unique" not in str(_findings(table))


def test_a_table_without_times_is_seen_to_wait(make_table: Make) -> None:
    """Guards G8: without a relay, rows of unknown age wait and all checks pass."""
    table = make_table(_OF_TENANTS, guides.D.mapping)
    table = table.described(describe.describe(table.settings, "ck").text)
    assert "the check lag cannot see how long rows wait" in str(_findings(table))
    assert _checked(table) == (0, [])
    _change(table, "INSERT INTO ck VALUES (1, 'a', DEFAULT, 'order', '1', 'order.placed', '{}')")
    code, failed = _checked(table)
    assert code == 1
    assert [word.strip(":") for word in failed[0].split()[:2]] == ["ERROR", "shards_relayed"]
    assert "how long is unknown without a created_at" in failed[0]
    with table.relayed():
        wait_until(lambda: _checked(table) == (0, []), what="a relay that publishes")


def _checked(table: Table) -> tuple[int, list[str]]:
    """The exit code of `outbox status --check`, and its checks that failed."""
    done = table.outbox.outbox("status", "--check", **table.environment)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("ERROR")]


def test_settings_that_do_not_fit(table: Table) -> None:
    """Guards against a check that passes and a relay that then refuses to start."""
    table = table.described(textbook.PUBLISHED_AT_MAPPING.replace('created_at = "created_at"\n', ""))
    done = _run(table, OUTBOX_DELIVERY="exactly_once", OUTBOX_VALUE_FORMAT="envelope")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("error")] == [
        "error: public.events cannot store the position that exactly_once needs: set "
        "OUTBOX_DELIVERY=at_least_once",
        "error: OUTBOX_VALUE_FORMAT, or that of a type, needs the time of an event: name its column as "
        "created_at in [table.columns]",
    ]


@pytest.mark.parametrize("option", [("--rebase",), ("--shard", "1")])
def test_options_that_do_not_fit(table: Table, option: tuple[str, ...]) -> None:
    """Guards against an option without effect, and against an error about tables that do not exist."""
    file = {"OUTBOX_TABLE": json.dumps(table.settings.table)}
    done = table.outbox.outbox("relay", "--until-empty", *option, **file)
    assert done.returncode == 2
    assert f"{option[0]}: an existing table (OUTBOX_TABLE) has no position and no shards" in done.stderr


def test_without_a_file(table: Table) -> None:
    """Guards against a traceback, and against a check of the append-only outbox's tables."""
    done = table.outbox.outbox("table", "check", OUTBOX_TABLE="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "`outbox table describe NAME` prints" in done.stderr


def test_what_describe_writes_is_checked(make_table: Make) -> None:
    """Guards against two commands that disagree: the first leads to the second."""
    table = make_table(guides.C.ddl, guides.C.mapping)
    description = describe.describe(table.settings, "outbox_events")
    table = table.described(description.text)
    assert len(_clean_after_statements(table)) == 3
