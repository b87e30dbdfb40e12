"""Wrong mappings, and tables that do not fit them: one line says how to correct each."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest

from outbox_pipelines.config.table_mapping import read_mapping
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import table_measurements
from outbox_pipelines.settings import load_settings
from tests.existing import textbook
from tests.existing.conftest import Make
from tests.existing.textbook import Table

_SMALLEST = 'name = "events"\n[columns]\npublished_at = "published_at"\n'


def test_what_is_not_named_is_called_as_usual() -> None:
    """Guards against files that must repeat what everybody calls so."""
    mapping = read_mapping({"name": "app.events", "columns": {"status": "state", "seq": "id"}})
    assert (mapping.schema, mapping.table, str(mapping)) == ("app", "events", "app.events")
    assert mapping.columns["payload"] == "payload"
    assert mapping.columns["id"] == mapping.columns["seq"] == "id"
    assert "headers" not in mapping.columns
    assert mapping.states == {"pending": "PENDING", "processed": "PROCESSED", "failed": "FAILED"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[columns]\n", 'names no table: write name = "outbox"'),
        ('name = "a.b.c"\n', "write a name, or a schema, a dot and a name"),
        ('name = "events"\n', "does not say which rows are pending: name published_at .* or status"),
        (_SMALLEST + 'status = "status"\n', "published_at and status, but only one"),
        (_SMALLEST + 'processed_at = "at"\n', "processed_at without status: call it published_at"),
        (_SMALLEST + 'sequence = "seq"\n', "unknown 'sequence' in \\[table.columns\\]: use id, seq,"),
        (_SMALLEST + "seq = 5\n", "seq = 5 in \\[table.columns\\]: write a name in quotes"),
        (_SMALLEST + 'payload = "id"\n', "maps both payload and id to 'id'"),
        (_SMALLEST + 'payload = "100%"\n', "payload = '100%', a name that cannot be used: rename"),
        (_SMALLEST + '[status]\npending = "NEW"\n', "but no column: write status"),
        (_SMALLEST + '[other]\na = "b"\n', "unknown entry 'other'"),
        ('order = "id"\n' + _SMALLEST, 'order = \'id\': write order = "seq" .*"created_at".* order = "none"'),
        ('order = "created_at"\n' + _SMALLEST + 'seq = "id"\n', "names seq, but has order"),
        ('aggregate_type = "{id}"\n' + _SMALLEST, "aggregate_type = '{id}': write a constant"),
        ('aggregate_type = "{event_type:last}"\n' + _SMALLEST, "write a constant such as"),
        ('aggregate_type = "{"\n' + _SMALLEST, "write a constant such as"),
        ("aggregate_type = 5\n" + _SMALLEST, "aggregate_type = 5: write a constant"),
        ('aggregate_type = "a%b"\n' + _SMALLEST, "aggregate_type = 'a%b': write a constant"),
        ('aggregate_type = "a"\n' + _SMALLEST + 'aggregate_type = "b"\n', "has aggregate_type twice"),
        ('name = "t"\ncolumns = "c"\n', r"write a section \[table.columns\]"),
        (
            'name = "t"\n[columns]\nstatus = "s"\n[status]\nfailed = "PENDING"\n',
            "one value twice .*: pending, processed and failed must differ",
        ),
    ],
)
def test_an_error_for_a_wrong_file_says_how_to_correct_it(text: str, message: str) -> None:
    """Guards against a mapping that is guessed at, or refused without help."""
    with pytest.raises(SetupError, match=f"^OUTBOX_TABLE .*{message}") as raised:
        load_settings(table=tomllib.loads(text))
    assert "\n" not in str(raised.value)


def test_the_examples_in_the_documentation() -> None:
    """Guards against files that are copied from there and refused."""
    text = (Path(__file__).parents[2] / "docs" / "existing-tables.md").read_text()
    found = [
        read_mapping(tomllib.loads(example)["table"])
        for example in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    ]
    assert [mapping.has_status for mapping in found] == [False, True, False]
    assert [mapping.order for mapping in found] == ["seq", "seq", "created_at"]
    assert found[2].aggregate_type == (("", "first"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DROP TABLE events", "table public.events does not exist"),
        ("ALTER TABLE events RENAME TO e; CREATE VIEW events AS SELECT * FROM e", "is not a table"),
        ("ALTER TABLE events DROP seq", "no column 'seq': .*order = .created_at."),
        ("ALTER TABLE events DROP headers", "no column 'headers': name the correct one as headers"),
        (
            "ALTER TABLE events ALTER seq DROP IDENTITY; ALTER TABLE events ALTER seq TYPE text",
            "'seq' .* has type text, which cannot be",
        ),
        (
            "ALTER TABLE events ALTER retry_count DROP DEFAULT, ALTER retry_count TYPE bool USING true",
            "has type boolean",
        ),
        (
            "ALTER TABLE events ALTER seq DROP IDENTITY, ALTER seq DROP NOT NULL",
            'allows NULL, and such a row cannot be relayed: .* ALTER COLUMN "seq" SET NOT NULL',
        ),
    ],
)
def test_a_table_that_does_not_fit(table: Table, change: str, message: str) -> None:
    """Guards against a relay that finds out at its first event."""
    with table.connect() as connection:
        connection.execute(change.encode())
    with pytest.raises(SetupError, match=message):
        table.drain()
    with pytest.raises(SetupError, match=message):
        table_measurements.read(table.settings)


def test_a_word_that_the_status_cannot_be(make_table: Make) -> None:
    """Guards against rows that would never be found, or never be marked."""
    mapping = textbook.STATUS_MAPPING.replace('failed = "broken"', 'failed = "dead"')
    with pytest.raises(
        SetupError, match=r'cannot have the value \'dead\': write failed = "…" in .* new, sent, broken'
    ):
        make_table(textbook.STATUS, mapping).drain()


def test_a_shape_with_the_time_needs_the_time(make_table: Make) -> None:
    """Guards against an envelope that fails at each event."""
    mapping = textbook.PUBLISHED_AT_MAPPING.replace('created_at = "created_at"\n', "")
    with pytest.raises(SetupError, match=r"OUTBOX_VALUE_FORMAT, or that of a type, needs .* created_at"):
        make_table(textbook.PUBLISHED_AT, mapping).drain(value_format="envelope")


def test_exactly_once_is_refused(table: Table) -> None:
    """Guards against a promise that is not kept."""
    with pytest.raises(SetupError, match="set OUTBOX_DELIVERY=at_least_once"):
        table.drain(delivery="exactly_once")


def test_a_missing_index_is_named_with_the_statement_that_makes_it(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a relay that silently reads the whole table for each claim."""
    assert table_measurements.read(table.settings).warnings == []
    with table.connect() as connection:
        connection.execute("DROP INDEX events_seq_idx; CREATE INDEX ON events (seq)")
        with caplog.at_level(logging.WARNING):
            table.drain()
        (warning,) = [r.getMessage() for r in caplog.records if "index" in r.getMessage()]
        _, _, statement = warning.partition("reads all of it: ")
        assert statement == 'CREATE INDEX CONCURRENTLY ON public.events ("seq") WHERE "published_at" IS NULL'
        connection.execute(statement.encode())
    assert table_measurements.read(table.settings).warnings == []


def test_a_missing_index_over_a_status(make_table: Make) -> None:
    """Guards against a statement that PostgreSQL or the claim cannot use."""
    table = make_table(textbook.STATUS, textbook.STATUS_MAPPING)
    assert table_measurements.read(table.settings).warnings == []
    with table.connect() as connection:
        connection.execute("DROP INDEX events_id_idx")
        (warning,) = table_measurements.read(table.settings).warnings
        connection.execute(warning.partition("reads all of it: ")[2].encode())
    assert table_measurements.read(table.settings).warnings == []


def test_a_table_that_cannot_remember_failures(make_table: Make) -> None:
    """Guards against dead letters that come back at each restart without a report."""
    table = make_table(textbook.PUBLISHED_AT, 'name = "events"\n[columns]\npublished_at = "published_at"')
    assert "ADD COLUMN failed_at timestamptz" in table_measurements.read(table.settings).warnings[0]
