"""`outbox table describe`: a file from the catalog, which relays the table once a person has checked it."""

from __future__ import annotations

import dataclasses
import tomllib
import uuid
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.config.table_mapping import Mapping, read_mapping
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import check, describe
from outbox_pipelines.existing.describe import Description
from tests.conftest import may_log_in, read_topic
from tests.existing import guides, textbook
from tests.existing.conftest import Make
from tests.existing.guides import Guide
from tests.existing.textbook import Table

_DEBEZIUM = """
CREATE TABLE outbox (
    id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL, payload jsonb)"""
_PROCESSED = "processed boolean NOT NULL DEFAULT false"


def _described(make_table: Make, ddl: str, name: str) -> tuple[Table, Description]:
    """A table of these statements, and what is written about it."""
    table = make_table(ddl, guides.D.mapping)
    return table, describe.describe(table.settings, name)


def _mapping(description: Description) -> Mapping:
    return read_mapping(tomllib.loads(description.text)["table"])


@pytest.mark.parametrize("guide", guides.ALL, ids=lambda guide: guide.name)
def test_a_guides_table_is_described_as_by_hand(guide: Guide, make_table: Make, tmp_path: Path) -> None:
    """Guards against a newcomer who must write the file, or gets one that relays something different."""
    name = "outbox_events" if guide is guides.C else "outbox"
    table, description = _described(make_table, guide.ddl, name)
    assert description.incomplete == []
    found = _mapping(description)
    expected = read_mapping(tomllib.loads(guide.mapping))
    if guide is guides.C:
        # Its serial is an order, and a better one than the times.
        columns = expected.columns | {"seq": "id"}
        expected = dataclasses.replace(expected, order="seq", columns=columns)
    assert found == expected
    findings = check.read(table.described(description.text).settings).findings
    assert not [finding for finding in findings if finding.is_error]


@pytest.mark.parametrize("guide", guides.ALL, ids=lambda guide: guide.name)
def test_a_description_alone_relays_the_table(guide: Guide, make_table: Make, tmp_path: Path) -> None:
    """Guards against a file that reads well and relays nothing."""
    name = "outbox_events" if guide is guides.C else "outbox"
    table, description = _described(make_table, guide.ddl, name)
    key = str(uuid.uuid4())
    with table.connect() as connection:
        ids = [guide.writers[0](connection, key, "order.created", {"n": n}) for n in range(20)]
    table = table.described(description.text).with_(**guide.settings)
    assert table.drain().events == 20
    kind = "order" if guide is guides.C else "Order"
    messages = read_topic(table.settings.kafka, table.outbox.topic(kind))
    assert [message.headers["id"] for message in messages] == ids
    assert {message.key for message in messages} == {key}
    assert table.drain().events == 0


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ("outbox", None),
        ("OUTBOX", None),
        ('"outbox"', None),
        ("public.outbox", "public"),
        ('"public"."outbox"', "public"),
        ("Public.Outbox", "public"),
    ],
)
def test_a_table_is_found_as_a_person_writes_its_name(
    make_table: Make, tmp_path: Path, given: str, schema: str | None
) -> None:
    """Guards against a name that works in psql and not here."""
    _, description = _described(make_table, guides.A.ddl, given)
    found = _mapping(description)
    assert (found.schema, found.table) == (schema, "outbox")


def test_names_in_upper_and_lower_case(make_table: Make, tmp_path: Path) -> None:
    """Guards against a table of an ORM in C# or Java, whose names a shell passes without quotes."""
    ddl = """
CREATE SCHEMA "App";
CREATE TABLE "App"."OutboxMessages" (
    "Id" uuid PRIMARY KEY, "Seq" bigint GENERATED ALWAYS AS IDENTITY, "AggregateType" text NOT NULL,
    "AggregateId" text NOT NULL, "EventType" text NOT NULL, "Body" text NOT NULL, "Headers" jsonb,
    "CorrelationId" text, "OccurredOn" timestamptz NOT NULL, "ProcessedOn" timestamptz, "Error" text);
CREATE TABLE "App".outboxmessages (a int)"""
    expected = {
        **{"id": "Id", "seq": "Seq", "aggregate_type": "AggregateType", "aggregate_id": "AggregateId"},
        **{"event_type": "EventType", "payload": "Body", "headers": "Headers", "created_at": "OccurredOn"},
        **{"correlation_id": "CorrelationId", "published_at": "ProcessedOn", "last_error": "Error"},
    }
    table, _ = _described(make_table, ddl, "App.OutboxMessages")
    for name in ("App.OutboxMessages", '"App"."OutboxMessages"'):
        found = _mapping(describe.describe(table.settings, name))
        assert str(found) == "App.OutboxMessages"
        assert found.columns == expected
    assert describe.describe(table.settings, 'App."outboxmessages"').incomplete != []


def test_names_that_are_written_with_escapes(make_table: Make, tmp_path: Path) -> None:
    """Guards against a file that is not TOML, and a comment that ends before its line does."""
    name = 'out"box\\ 🙂\nx'
    quoted = '"' + name.replace('"', '""') + '"'
    ddl = (
        f"CREATE TABLE {quoted} (id uuid PRIMARY KEY, aggregate_type text NOT NULL, "
        "aggregate_id text NOT NULL, event_type text NOT NULL, payload jsonb, created_at timestamptz, "
        "published_at timestamptz, "
        '"un\nused" text, "100%" int)'
    )
    table = make_table(ddl, guides.D.mapping)
    description = describe.describe(table.settings, quoted)
    # As the file has it, too.
    assert describe.describe(table.settings, name) == description
    assert _mapping(description).table == name
    assert r"un\nused (text), 100% (integer)" in description.text


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (
            "status text NOT NULL DEFAULT 'new' CHECK (status IN ('new', 'sent', 'dead'))",
            ("new", "sent", "dead"),
        ),
        ("state kind NOT NULL", ("NEW", "DONE", "ERROR")),
        ("status varchar(20) NOT NULL DEFAULT 'UNPROCESSED'", ("UNPROCESSED", "PROCESSED", "FAILED")),
        ("status text NOT NULL DEFAULT 'pending'", ("pending", "processed", "failed")),
        ("status text DEFAULT 'wartend'", ("wartend", "PUBLISHED", "dead-letter")),
    ],
)
def test_the_values_of_a_status(
    make_table: Make, tmp_path: Path, column: str, found: tuple[str, str, str]
) -> None:
    """Guards against rows that would never be found, or be marked with a word that nothing else knows."""
    ddl = (
        "CREATE TYPE kind AS ENUM ('NEW', 'PROCESSING', 'DONE', 'ERROR');"
        "CREATE TABLE outbox (id bigserial PRIMARY KEY, aggregate_type text NOT NULL, aggregate_id text "
        f"NOT NULL, event_type text NOT NULL, payload jsonb, {column})"
    )
    table, _ = _described(make_table, ddl, "outbox")
    if "wartend" in column:
        with table.connect() as connection:
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, status) "
                "SELECT 'o', '1', 'e', s FROM unnest(ARRAY['PUBLISHED', 'dead-letter', 'PUBLISHED']) s"
            )
    description = describe.describe(table.settings, "outbox")
    assert description.incomplete == []
    mapping = _mapping(description)
    assert tuple(mapping.states[name] for name in ("pending", "processed", "failed")) == found
    assert ("# Not pending: PROCESSING" in description.text) == ("kind" in column)


def test_a_status_that_means_something_different(make_table: Make, tmp_path: Path) -> None:
    """Guards against the state of an order that is taken for that of its event."""
    ddl = guides.D.ddl.replace(
        "retry_count", "status text NOT NULL DEFAULT 'x' CHECK (status = 'shipped'), retry_count"
    )
    _, description = _described(make_table, ddl.replace("DEFAULT 'x' ", ""), "outbox")
    assert description.incomplete == []
    assert not _mapping(description).has_status
    assert "Not used: status (text)" in description.text


def test_an_event_id_beside_a_serial(make_table: Make, tmp_path: Path) -> None:
    """Guards against consumers that deduplicate by the number of a row."""
    ddl = """
CREATE TABLE outbox (
    id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, event_id uuid NOT NULL, entity_type text NOT NULL,
    entity_id text NOT NULL, event_name text NOT NULL, data json NOT NULL, body text, occurred_at timestamp,
    dispatched_at timestamptz, attempts smallint NOT NULL DEFAULT 0, error text, version int,
    metadata jsonb)"""
    _, description = _described(make_table, ddl, "outbox")
    assert _mapping(description).columns == {
        **{"id": "event_id", "seq": "id", "aggregate_type": "entity_type", "aggregate_id": "entity_id"},
        **{"event_type": "event_name", "payload": "body", "created_at": "occurred_at"},
        **{"published_at": "dispatched_at", "retry_count": "attempts", "last_error": "error"},
    }
    assert "could also be data" in description.text
    assert '# version = "version"' in description.text
    assert '# headers = "metadata"' in description.text


def test_what_cannot_be_decided_is_a_line_to_complete(make_table: Make) -> None:
    """Guards against a file that relays all rows, again and again, or none; Debezium's has no mark."""
    table, description = _described(make_table, _DEBEZIUM, "outbox")
    assert description.incomplete == ["order", "published_at or status"]
    columns = tomllib.loads(description.text)["table"]["columns"]
    assert columns == {
        **{"id": "id", "aggregate_type": "aggregatetype", "aggregate_id": "aggregateid"},
        **{"event_type": "type", "payload": "payload"},
    }
    assert '\n# published_at = "…"' in description.text
    done = table.outbox.outbox("table", "describe", "outbox")
    assert (done.returncode, done.stdout) == (2, description.text)
    assert done.stderr == (
        "outbox: the description of outbox is incomplete: complete its commented lines for order, "
        "published_at or status\n"
    )


def test_a_boolean_is_no_mark(make_table: Make) -> None:
    """Guards against a user who searches for a setting that does not exist."""
    ddl = guides.D.ddl.replace("published_at timestamptz", _PROCESSED).replace(
        "published_at IS NULL", "NOT processed"
    )
    _, description = _described(make_table, ddl, "outbox")
    assert description.incomplete == ["published_at or status"]
    assert "# A boolean (processed) cannot be either: ALTER TABLE … ADD COLUMN\n" in description.text


def test_a_boolean_beside_the_mark(make_table: Make, tmp_path: Path) -> None:
    """Guards against a history that is published again, because only the new column counts."""
    ddl = guides.D.ddl.replace("published_at timestamptz", 'published_at timestamptz, "is Sent" boolean')
    table = make_table(ddl, guides.D.mapping)
    with table.connect() as connection:
        for n in range(3):
            guides.D.writers[0](connection, str(uuid.uuid4()), "order.created", {"n": n})
        connection.execute('UPDATE outbox SET "is Sent" = true WHERE id <> (SELECT id FROM outbox LIMIT 1)')
    (finding,) = (each for each in check.read(table.settings).findings if "is Sent" in each.text)
    assert not finding.is_error
    with table.connect() as connection:
        (statement,) = finding.statements
        assert connection.execute(statement.encode()).rowcount == 2
    assert not any("is Sent" in each.text for each in check.read(table.settings).findings)
    assert table.drain().events == 1


def test_the_reader_of_a_table_whose_schema_is_quoted(make_table: Make) -> None:
    """Guards against a description that fails, because another schema has a name in capitals."""
    ddl = 'CREATE SCHEMA "My-App"; ' + _DEBEZIUM.replace("TABLE outbox", 'TABLE "My-App"."Out box"')
    table = make_table(f'{ddl}; CREATE PUBLICATION connector FOR TABLE "My-App"."Out box"', guides.D.mapping)
    with table.connect() as connection:
        name = f"my_app_{uuid.uuid4().hex}"
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        try:
            assert f'slot = "{name}"' in describe.describe(table.settings, "My-App.Out box").text
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [name])


def test_a_table_without_a_body(make_table: Make) -> None:
    """Guards against a body that is taken from any column."""
    ddl = guides.D.ddl.replace("payload jsonb", "payload bytea")
    _, description = _described(make_table, ddl, "outbox")
    assert description.incomplete == ["payload"]
    assert '\n# payload = "…"' in description.text


def test_a_description_that_is_to_be_completed(make_table: Make) -> None:
    """Guards against a table that cannot be described again, because its description is incomplete."""
    table, description = _described(make_table, guides.A.ddl, "outbox")
    done = table.outbox.outbox("table", "describe", "outbox", OUTBOX_TABLE='{"name": "outbox"}')
    assert (done.returncode, done.stdout, done.stderr) == (0, description.text, "")


@pytest.mark.parametrize(
    ("ddl", "name", "message"),
    [
        ("CREATE SCHEMA app; CREATE TABLE app.box ()", "box", "table box does not exist: there is app.box;"),
        (
            'CREATE SCHEMA "App"; CREATE TABLE "App"."OutboxMessages" ()',
            "outbx",
            "table outbx does not exist: there is App.OutboxMessages, public.outbox; give the name, with its",
        ),
        (
            "ALTER TABLE outbox RENAME TO messages",
            "outbox",
            "table outbox does not exist: no other table has outbox in its name; give the name",
        ),
        ("", "a.b.c", "is not the name of a table"),
        ("", "", "is not the name of a table"),
        ("CREATE VIEW v AS SELECT 1", "v", "public.v is not a table but a view: name the table"),
        ("CREATE MATERIALIZED VIEW m AS SELECT 1", "m", "is not a table but a materialized view"),
        ("CREATE SEQUENCE s", "s", "is not a table but a sequence"),
        (
            guides.E.ddl.replace("outbox", "e"),
            "e_new",
            "public.e_new is a partition: name its parent, public.e",
        ),
        (
            "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER f FOREIGN DATA WRAPPER w; "
            "CREATE FOREIGN TABLE far (id int) SERVER f",
            "far",
            "is not a table but a foreign table",
        ),
        (
            'CREATE TABLE "a.b" ()',
            '"a.b"',
            "has a name with a dot or %, which the file cannot contain: rename",
        ),
    ],
)
def test_what_is_no_table(make_table: Make, ddl: str, name: str, message: str) -> None:
    """Guards against a description of something that cannot be relayed, and against a traceback."""
    table = make_table(guides.D.ddl + ";" + ddl, guides.D.mapping)
    done = table.outbox.outbox("table", "describe", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_name(make_table: Make) -> None:
    """Guards against an operator who has to search the database for the name."""
    table = make_table("CREATE SCHEMA app; CREATE TABLE app.outbox ();" + guides.D.ddl, guides.D.mapping)
    done = table.outbox.outbox("table", "describe")
    assert (done.returncode, done.stdout) == (2, "")
    names = "app.outbox, public.outbox"
    assert done.stderr == f"outbox: no table is named: there is {names}; give the name, with its schema\n"


def test_a_role_without_rights(make_table: Make) -> None:
    """Guards against a description that fails later, or a message that names no GRANT."""
    table = make_table(
        "CREATE SCHEMA app; "
        + guides.D.ddl.replace("TABLE outbox", "TABLE app.outbox").replace("ON outbox", "ON app.outbox"),
        guides.D.mapping,
    )
    role = f"relay_{uuid.uuid4().hex[:8]}"
    with table.connect() as connection:
        connection.execute(f"CREATE ROLE {role} {may_log_in(table.settings.dsn)}".encode())
        try:
            modest = table.with_(dsn=psycopg.conninfo.make_conninfo(table.settings.dsn, user=role)).settings
            for right in ('USAGE ON SCHEMA "app"', "SELECT, UPDATE ON app.outbox"):
                grant = f"GRANT {right} TO {role}"
                with pytest.raises(SetupError, match=f"{grant}$"):
                    describe.describe(modest, "app.outbox")
                connection.execute(grant.encode())
            assert describe.describe(modest, "app.outbox").incomplete == []
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_the_textbooks_tables_of_these_tests(make_table: Make, tmp_path: Path) -> None:
    """Guards against an integer that is counted and not taken for the order."""
    _, description = _described(make_table, textbook.PUBLISHED_AT, "public.events")
    assert _mapping(description) == read_mapping(tomllib.loads(textbook.PUBLISHED_AT_MAPPING))
