"""`outbox dead-letters` for a marked table: its rows are the record."""

from __future__ import annotations

import json
import subprocess

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.dead_letter_rows import DeadLetterRows
from tests.existing import guides, textbook
from tests.existing.conftest import Make
from tests.existing.textbook import Table

_ROWS = {
    "published_at": (
        textbook.PUBLISHED_AT,
        textbook.PUBLISHED_AT_MAPPING,
        "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, retry_count, last_error, "
        "published_at) SELECT 'order', 'a', 'order.placed', jsonb_build_object('n', i), "
        "CASE i WHEN 2 THEN 0 ELSE 5 END, 'outbox: dead letter: too large, ' || i, "
        "CASE i WHEN 3 THEN now() END "
        "FROM generate_series(1, 4) i",
        "payload",
    ),
    "status": (
        textbook.STATUS,
        textbook.STATUS_MAPPING,
        "INSERT INTO events (kind, entity, name, body, state, broken_at, tries, problem) SELECT 'order', "
        "gen_random_uuid(), 'order.placed', format('{\"n\": %s}', i), "
        "CASE i WHEN 2 THEN 'new' WHEN 3 THEN 'sent' ELSE 'broken' END::event_state, "
        "CASE WHEN i NOT IN (2, 3) THEN now() END, 5, 'outbox: large, ' || i FROM generate_series(1, 4) i",
        "body::jsonb",
    ),
}


def _run(table: Table, *arguments: str) -> subprocess.CompletedProcess[str]:
    return table.outbox.outbox("dead-letters", *arguments, **_table(table))


def _table(table: Table) -> dict[str, str]:
    return {"OUTBOX_TABLE": json.dumps(table.settings.table)}


@pytest.mark.extended
@pytest.mark.parametrize("shape", _ROWS)
def test_a_run_until_empty_counts_those_of_earlier_runs(make_table: Make, shape: str) -> None:
    """Guards against a job that is green while events of the table are dead letters."""
    ddl, mapping, insert, _ = _ROWS[shape]
    table = make_table(ddl, mapping)
    with table.connect() as connection:
        connection.execute(insert.encode())
    file = _table(table)
    for published in ("1 event", "0 events"):
        run = table.outbox.outbox("relay", "--until-empty", **file)
        assert run.returncode == 1, run.stderr
        assert f"published {published} in" in run.stderr
        assert "2 events could not be published" in run.stderr
    assert _run(table, "replay", "--all", "--reason", "x", "--yes").returncode == 0
    assert table.outbox.outbox("relay", "--until-empty", **file).returncode == 0


@pytest.mark.parametrize("shape", _ROWS)
def test_they_are_listed_shown_and_replayed(make_table: Make, shape: str) -> None:
    """Guards against a check whose remedy is a command that fails, and against other rows."""
    ddl, mapping, insert, body = _ROWS[shape]
    table = make_table(ddl, mapping)
    with table.connect() as connection:
        connection.execute(insert.encode())
        ids = dict(
            connection.execute(f"SELECT ({body}->>'n')::int, id::text FROM events".encode()).fetchall()
        )
    reason = "too large" if shape == "published_at" else "large"
    listed = json.loads(_run(table, "list", "--json").stdout)
    assert {row["id"] for row in listed["rows"]} == {ids[1], ids[4]}
    assert (listed["total"], listed["by_error"]) == (
        2,
        {f"{reason}, 1": 1, f"{reason}, 4": 1},
    )
    assert f"{ids[1]}  order.placed  order " in _run(table, "list", "--error", "large, 1").stdout
    (shown,) = json.loads(f"[{_run(table, 'show', ids[1]).stdout}]")
    assert any(str(value).endswith(f"{reason}, 1") for value in shown.values())
    assert _run(table, "show", ids[3]).returncode == 1
    replay = ("replay", "--reason", "wider", "--yes")
    assert _run(table, *replay, "--event-type", "other").returncode == 1
    for option in ("--aggregate-id", "--error"):
        refused = _run(table, *replay, "--event-type", "order.placed", option, "")
        assert (refused.returncode, "the text is empty" in refused.stderr) == (2, True)
    assert _run(table, *replay, ids[1], ids[2], ids[3]).stdout == "1 dead letter replayed\n"
    assert table.drain().events == 2
    assert sorted(json.loads(message.value or "")["n"] for message in table.messages()) == [1, 2]
    assert json.loads(_run(table, "list", "--json").stdout)["total"] == 1


def test_what_the_table_cannot_do_is_refused(make_table: Make) -> None:
    """Guards against a filter that selects all, and a replay of rows that are not dead letters."""
    table = make_table(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    for arguments, message in (
        (("list", "--since", "1h"), "events has no failed_at, so --since cannot select: leave it out"),
        (("list", "--discarded"), "has no discarded dead letters"),
        (("discard", "--all", "--reason", "x"), "has no place for discarded dead letters: delete the rows"),
    ):
        table.fill(1)
        with table.connect() as connection:
            connection.execute("UPDATE events SET retry_count = 5, last_error = 'outbox: dead letter: x'")
        # A dry run too, and before a person is asked.
        for options in (("--yes",), ("--dry-run",), ()) if "discard" in arguments else ((),):
            refused = _run(table, *arguments, *options)
            assert (refused.returncode, refused.stdout) == (2, "")
            assert message in refused.stderr
    without = make_table(guides.C.ddl, guides.C.mapping)
    for text in ("", "large"):
        with pytest.raises(SetupError, match="has no last_error, so --error cannot select"):
            DeadLetterRows(without.settings).find({"error": text}, limit=1, discarded=False)
    with without.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_events (aggregate_id, event_type, event_data, status, retry_count) "
            "VALUES ('1', 'order.created', '{}', 'FAILED', 7)"
        )
    # Why it failed is not recorded, and that is said.
    listed = _run(without, "list").stdout
    assert listed.count("unknown: the table has no last_error; see the relay's log") == 2
    assert "  7 attempts  " in listed
    assert (
        "1 × unknown: the table has no last_error"
        in without.outbox.outbox("status", **_table(without)).stdout
    )
    checked = without.outbox.outbox("table", "check", **_table(without)).stdout
    assert "has no last_error: why an event was refused is only in the relay's log" in checked
    forgetful = make_table(guides.E.ddl, guides.E.mapping)
    assert "so its dead letters are not recorded" in _run(forgetful, "list").stderr
