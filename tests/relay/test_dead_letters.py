"""Dead letters in an operator's hands: found, shown, replayed, discarded, and written down."""

from __future__ import annotations

import json
import pty
import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor
from os import fdopen
from typing import Final, LiteralString

import pytest

from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.writer import emit
from tests import forks
from tests.conftest import Outbox, clean_environment, command, may_log_in, wait_until
from tests.relay.parked import keys, numbers, parked_rows, write
from tests.relay.threads import quick, running
from tests.relay.topic import NOISE, change_topic, create_topic


@pytest.fixture
def letters(outbox: Outbox) -> list[str]:
    """Three dead letters of two aggregates and types; their ids."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    with outbox.connect(autocommit=False) as connection:
        ids = [
            str(emit(connection, "order", key, kind, {"n": n, "noise": NOISE}).id)
            for n, (key, kind) in enumerate([("a", "order.placed"), ("a", "order.paid"), ("b", "order.paid")])
        ]
        emit(connection, "order", "b", "order.shipped", {"n": 3})
    settings = quick(outbox, max_attempts=1)
    with running(settings):
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed"] * 3)
        wait_until(lambda: numbers(outbox, "b") == [3])
    return ids


def test_they_are_listed_and_counted(outbox: Outbox, letters: list[str]) -> None:
    """Guards against dead letters that an operator cannot find."""
    done = outbox.process("dead-letters", "list")
    assert done.returncode == 0, done.stderr
    assert all(one in done.stdout for one in letters)
    assert "3 × MSG_SIZE_TOO_LARGE" in done.stdout
    found = json.loads(outbox.outbox("dead-letters", "list", "--json", "--limit", "1").stdout)
    assert (found["total"], len(found["rows"])) == (3, 1)
    assert outbox_measurements.read(outbox.settings).dead_letters == 3
    assert "dead letters  3" in outbox.outbox("status").stdout


FILTERS: Final[dict[tuple[str, ...], set[int]]] = {
    ("--event-type", "order.paid"): {1, 2},
    ("--aggregate-type", "order", "--aggregate-id", "a"): {0, 1},
    ("--error", "TOO_LARGE"): {0, 1, 2},
    ("--error", "no such reason"): set(),
    ("--since", "1h"): {0, 1, 2},
    ("--until", "1h"): set(),
    ("--since", "2020-01-01T00:00", "--until", "2020-01-02"): set(),
}


@pytest.mark.extended
def test_filters(outbox: Outbox, letters: list[str]) -> None:
    """Guards against an action on others than those that were meant."""
    found = {}
    for options in FILTERS:
        listed = json.loads(outbox.outbox("dead-letters", "list", "--json", *options).stdout)
        found[options] = {letters.index(row["id"]) for row in listed["rows"]}
    assert found == FILTERS


def test_one_is_shown_whole(outbox: Outbox, letters: list[str]) -> None:
    """Guards against an operator who must read the table by hand."""
    shown = json.loads(outbox.outbox("dead-letters", "show", letters[1]).stdout)
    assert shown["payload"]["n"] == 1
    assert shown["event_type"] == "order.paid"
    assert shown["attempts"] == 1
    assert shown["actions"] == []
    none = outbox.outbox("dead-letters", "show", str(uuid.uuid4()))
    assert none.returncode == 1
    assert "neither parked nor a dead letter" in none.stderr


def test_a_deep_payload_is_shown(outbox: Outbox) -> None:
    """Guards against a traceback in place of the dead letter: PostgreSQL takes what Python cannot read."""
    deep = "[" * 6_000 + "]" * 6_000
    with outbox.connect() as connection:
        row = connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "VALUES ('no/topic', 'deep', 'order.placed', jsonb_build_object('deep', %s::jsonb)) RETURNING id",
            [deep],
        ).fetchone()
    assert row is not None
    service.relay(quick(outbox, max_attempts=1), until_empty=True)
    done = outbox.outbox("dead-letters", "show", str(row[0]))
    assert (done.returncode, done.stderr) == (0, "")
    assert (shown := json.loads(done.stdout))["id"] == str(row[0])
    assert shown["attempts"] == 1
    assert shown["payload"] == f'{{"deep": {deep}}}'


def test_a_dry_run_changes_nothing(outbox: Outbox, letters: list[str]) -> None:
    """Guards against a dry run that changes something."""
    done = outbox.outbox("dead-letters", "replay", "--all", "--reason", "topic mended", "--dry-run")
    assert done.stdout == "3 dead letters would be replayed\n"
    assert [row[2] for row in parked_rows(outbox)] == ["failed"] * 3
    assert _audit(outbox) == []


def test_replay_after_the_topic_was_corrected(outbox: Outbox, letters: list[str]) -> None:
    """Guards against a replay that the running relay does not hear of."""
    with running(quick(outbox, max_attempts=1)):
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        done = outbox.outbox(
            "dead-letters", "replay", "--aggregate-id", "a", "--reason", "topic mended", "--yes"
        )
        assert done.stdout == "2 dead letters replayed\n", done.stderr
        wait_until(lambda: numbers(outbox, "a") == [0, 1], what="both, in order")
        wait_until(lambda: [row[1] for row in parked_rows(outbox)] == [letters[2]])
    ((actor, action, reason, which, events),) = _audit(outbox)
    assert "@" in actor
    assert (action, reason, which) == ("replay", "topic mended", {"aggregate_id": "a"})
    with outbox.connect() as connection:
        written = connection.execute("SELECT id::text FROM outbox WHERE seq = ANY (%s)", [events]).fetchall()
    assert {id for (id,) in written} == set(letters[:2])


@pytest.mark.extended
def test_a_replay_that_is_refused_is_a_dead_letter_again(outbox: Outbox, letters: list[str]) -> None:
    """Guards against a replay that blocks the aggregate, or is tried without end."""
    with running(quick(outbox, max_attempts=5)):
        outbox.outbox("dead-letters", "replay", letters[2], "--reason", "let us see", "--yes")
        wait_until(lambda: parked_rows(outbox)[2][2:] == ("failed", 2))
        with outbox.connect(autocommit=False) as connection:
            emit(connection, "order", "b", "order.paid", {"n": 4})
        wait_until(lambda: numbers(outbox, "b") == [3, 4])
    shown = json.loads(outbox.outbox("dead-letters", "show", letters[2]).stdout)
    assert [one["reason"] for one in shown["actions"]] == ["let us see"]


def test_discard_lets_a_blocked_aggregate_go(outbox: Outbox, letters: list[str]) -> None:
    """Guards against an aggregate that stays blocked by dead letters."""
    with running(quick(outbox, max_attempts=1, on_dead_letter="block")):
        with outbox.connect(autocommit=False) as connection:
            emit(connection, "order", "a", "order.paid", {"n": 5})
            emit(connection, "order", "c", "order.paid", {"n": 6})
        wait_until(lambda: "c" in keys(outbox))
        assert numbers(outbox, "a") == []
        done = outbox.outbox(
            "dead-letters", "discard", *letters[:2], "--reason", "nobody needs them", "--yes", "--json"
        )
        assert json.loads(done.stdout) == {"action": "discard", "dry_run": False, "found": 2, "done": 2}
        wait_until(lambda: numbers(outbox, "a") == [5])
    assert [row[2] for row in parked_rows(outbox)] == ["discarded", "discarded", "failed"]
    assert outbox_measurements.read(outbox.settings).dead_letters == 1
    listed = json.loads(outbox.outbox("dead-letters", "list", "--discarded", "--json").stdout)
    assert listed["total"] == 2
    with outbox.connect() as connection:
        rows = connection.execute("SELECT status FROM outbox_events ORDER BY seq").fetchall()
    assert [row[0] for row in rows] == [
        "DISCARDED",
        "DISCARDED",
        "FAILED",
        "PROCESSED",
        "PROCESSED",
        "PROCESSED",
    ]


WRONG: Final[dict[tuple[str, ...], str]] = {
    ("replay", "--reason", "x", "--yes"): "name ids, give a filter, or use --all",
    ("discard", "--all", str(uuid.UUID(int=1)), "--reason", "x", "--yes"): "use --all, not both",
    ("discard", "--all", "--yes"): "--reason",
    ("discard", "--all", "--yes", "--reason", " "): "the text is empty",
    ("replay", "--error", "", "--event-type", "order.paid", "--yes", "--reason", "x"): "the text is empty",
    ("discard", "--all", "--reason", "x"): "Without a terminal, add --yes",
    ("show", "17"): "'17' is not a valid UUID",
    ("list", "--since", "yesterday"): "write a time (2026-11-21T14:00, UTC) or an age (30m, 2h, 7d",
    ("list", "--limit", "0"): "--limit",
}


def test_wrong_input(outbox: Outbox, letters: list[str]) -> None:
    """Guards against an action that the operator did not intend, and a message that does not help."""
    for arguments, says in WRONG.items():
        done = outbox.outbox("dead-letters", *arguments)
        assert done.returncode == 2, arguments
        assert says in done.stderr, arguments
        assert [row[2] for row in parked_rows(outbox)] == ["failed"] * 3, arguments


def test_nothing_found_is_said(outbox: Outbox) -> None:
    """Guards against a script that believes it has replayed something."""
    assert outbox.outbox("dead-letters", "list").stdout == "none\n"
    done = outbox.outbox("dead-letters", "replay", "--all", "--reason", "x", "--yes")
    assert (done.returncode, done.stdout) == (1, "0 dead letters replayed\n")


def test_it_asks_before_it_acts(outbox: Outbox, letters: list[str]) -> None:
    """Guards against a slip of the finger."""
    ours, theirs = pty.openpty()
    with fdopen(ours, "wb", buffering=0) as terminal:
        process: forks.Popen[str] = forks.Popen(
            command("dead-letters", "discard", "--all", "--reason", "x"),
            env=clean_environment() | outbox.environment,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        terminal.write(b"n\n")
        _, asked = process.communicate(timeout=600)
    assert "discard 3 dead letters? [y/N]" in asked
    assert process.returncode == 1
    assert [row[2] for row in parked_rows(outbox)] == ["failed"] * 3


def test_a_reader_may_not_act(outbox: Outbox, letters: list[str]) -> None:
    """Guards against a traceback where grants are missing."""
    import psycopg

    role = f"relay_{uuid.uuid4().hex[:8]}"
    with outbox.connect() as connection:
        connection.execute(f"CREATE ROLE {role} {may_log_in(outbox.settings.dsn)}".encode())
        try:
            connection.execute("SELECT outbox_grant_relay(%s::regrole)", [role])
            dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, user=role)
            done = outbox.outbox("dead-letters", "discard", "--all", "--reason", "x", "--yes", OUTBOX_DSN=dsn)
            assert done.returncode == 2
            assert "permission denied" in done.stderr
            connection.execute("SELECT outbox_grant_operator(%s::regrole)", [role])
            given = {"OUTBOX_DSN": dsn}
            assert outbox.outbox("status", **given).returncode == 0
            done = outbox.outbox("dead-letters", "discard", letters[2], "--reason", "x", "--yes", **given)
            assert done.stdout == "1 dead letter discarded\n", done.stderr
            modest = Outbox(outbox.settings.model_copy(update={"dsn": dsn}))
            with outbox.connect() as other:
                other.execute("UPDATE outbox_parked SET state = 'replaying' WHERE aggregate_id = 'a'")
            service.relay(quick(modest, max_attempts=1), until_empty=True)
            assert [row[2] for row in parked_rows(outbox)] == ["failed", "failed", "discarded"]
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def _audit(outbox: Outbox) -> list[tuple[str, str, str, dict[str, str], list[int]]]:
    with outbox.connect() as connection:
        return connection.execute(
            "SELECT on_behalf_of, action, reason, filter, events FROM outbox_audit"
        ).fetchall()


@pytest.mark.parametrize("statement", [parking_sql.ACT, parking_sql.COMMANDS_RAN], ids=["operator", "relay"])
def test_dead_letters_are_locked_in_order(outbox: Outbox, statement: LiteralString) -> None:
    """Guards against a deadlock of an operator's action and a relay, which would start over."""
    write(outbox, *[(str(n), {}) for n in range(3)])
    given = {"action": "discard", "reason": "x", "filter": "{}", "on_behalf_of": None}
    with (
        outbox.connect(autocommit=False) as first,
        outbox.connect() as second,
        outbox.connect() as other,
        ThreadPoolExecutor(1) as thread,
    ):
        # A scan of the table finds them in the opposite order.
        other.execute("INSERT INTO outbox_parked SELECT o.*, 'failed' FROM outbox o ORDER BY seq DESC")
        lowest, *more = other.execute("SELECT seq FROM outbox_parked ORDER BY seq").fetchall()
        first.execute("SELECT FROM outbox_parked WHERE seq = %s FOR UPDATE", lowest)
        seqs = [seq for (seq,) in (*more, lowest)]
        ended = thread.submit(second.execute, statement, {"seqs": seqs, **given})
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        try:
            wait_until(lambda: other.execute(waits, [second.info.backend_pid]).fetchone() == (True,))
            unlocked = other.execute("SELECT seq FROM outbox_parked ORDER BY seq FOR UPDATE SKIP LOCKED")
            assert unlocked.fetchall() == more
        finally:
            first.rollback()
        ended.result(600)
