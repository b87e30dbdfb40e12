"""The tables of other libraries: described without a written line, relayed once, and given back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import check, describe
from tests.conftest import either, read_topic
from tests.existing import guides, libraries
from tests.existing.conftest import Make
from tests.existing.libraries import Library
from tests.existing.textbook import PUBLISHED_AT_MAPPING, Table
from tests.relay.topic import create_topic

_ORDERS: Final = """
UPDATE event_publication
SET serialized_event = '{"orderId": "7", "n": ' || coalesce(serialized_event::jsonb ->> 'n', '0') || '}'"""
_LEFT: Final = """
SELECT listener_id, count(*) FROM event_publication WHERE completion_date IS NULL GROUP BY listener_id"""


def _by_key(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _errors(table: Table) -> list[str]:
    return [finding.text for finding in check.read(table.settings).findings if finding.is_error]


@pytest.mark.parametrize("library", either(*libraries.ALL), ids=lambda library: library.name)
def test_rows_of_a_library_are_published_once(library: Library, make_table: Make) -> None:
    """Guards against events that are lost, reordered, or published again by the library's own publisher."""
    table = make_table(library.ddl, guides.D.mapping)
    with table.connect() as connection:
        connection.execute(library.rows.encode())
        description = describe.describe(table.settings, library.table)
        assert f"the table of {library.name}:" in description.text
        assert library.says in description.text
        table = table.described(description.text)
        assert (description.incomplete, _errors(table)) == ([], [])
        create_topic(table.outbox, 1, of=library.topic_of)
        assert table.drain().events == 3
        messages = read_topic(table.settings.kafka, table.outbox.topic(library.topic_of))
        values = [library.value.format(n=n) for n in (1, 2, 3)]
        expected = _by_key(zip(library.keys, values, strict=True))
        assert _by_key((message.key, message.value or "") for message in messages) == expected
        assert library.headers.items() <= messages[0].headers.items()
        # The way back: its own publisher sees what is written later, and nothing else.
        if library.back:
            connection.execute(library.back.encode())
        assert connection.execute(library.asks.encode()).fetchall() == []
        connection.execute(library.more.encode())
        assert len(connection.execute(library.asks.encode()).fetchall()) == 1


@pytest.mark.extended
def test_a_table_that_cannot_be_relayed_as_it_is(make_table: Make) -> None:
    """Guards against binary bodies in topics, rows without a mark, and listeners that are not called."""
    table = make_table(";".join(ddl for ddl, _ in libraries.REFUSED.values()), guides.D.mapping)
    for name, (_, reason) in libraries.REFUSED.items():
        with pytest.raises(SetupError) as refused:
            describe.describe(table.settings, name)
        assert reason in str(refused.value)


@pytest.mark.extended
def test_rows_of_one_of_several_receivers_are_moved(make_table: Make) -> None:
    """Guards against a listener that is not called, or an event that is moved twice, or not at all."""
    table = make_table(libraries.SPRING_2.ddl, guides.D.mapping)
    schema.migrate(table.settings)
    with table.connect() as connection:
        for listener in ("EventExternalizer", "Stock"):
            rows = libraries.SPRING_2.rows.replace("EventExternalizer", listener)
            connection.execute(rows.replace("id::uuid", "gen_random_uuid()").encode())
        connection.execute(_ORDERS)
        for _ in range(2):
            connection.execute(libraries.printed("WITH taken").encode())
        moved = connection.execute("SELECT payload ->> 'n', aggregate_id FROM outbox ORDER BY seq").fetchall()
        left = connection.execute(_LEFT).fetchall()
    assert moved == [("0", "7"), ("1", "7"), ("2", "7"), ("3", "7")]
    assert left == [("o.s.m.Stock.externalize(java.lang.Object)", 4)]


@pytest.mark.extended
def test_a_status_of_numbers(make_table: Make) -> None:
    """Guards against a mark that the database refuses at the first event."""
    ddl = guides.D.ddl.replace(
        "published_at timestamptz", "next_attempt_at timestamptz NOT NULL, state smallint NOT NULL DEFAULT 0"
    ).replace("published_at IS NULL", "state = 0")
    table = make_table(ddl, PUBLISHED_AT_MAPPING)
    description = describe.describe(table.settings, "outbox")
    assert description.incomplete == ["processed", "failed"]
    assert 'pending = "0"' in description.text
    section = description.text + 'processed = "1"\nfailed = "{}"\n'
    assert _errors(table.described(section.format(2))) == []
    findings = check.read(table.described(section.format(2)).settings).findings
    assert not any("no index over its pending rows" in finding.text for finding in findings)
    wrong = section.format("dead").replace(
        "[table.columns]", '[table.columns]\nnext_attempt_at = "next_attempt_at"'
    )
    problems = _errors(table.described(wrong))
    assert [problem.partition(":")[0] for problem in problems] == [
        "column 'next_attempt_at' of outbox (next_attempt_at) is NOT NULL, and must be able to be null",
        "column 'state' of outbox cannot have the value 'dead'",
    ]
