"""The mutations themselves: each condition, comparison, lock, order, default and setting of a statement."""

from __future__ import annotations

from typing import Final

import pytest

from tests.mutants import catalog, patch, sql

_CONDITIONS: Final = "SELECT * FROM t WHERE a = 1 AND b < 2 AND NOT EXISTS (SELECT FROM u WHERE c OR d)"
_UPDATE: Final = "UPDATE t SET a = b, c = CASE WHEN d = 1 THEN 2 END FROM u WHERE e IS NULL"
_CLAIM: Final = "SELECT a FROM t ORDER BY a, b DESC LIMIT 1 FOR NO KEY UPDATE OF t SKIP LOCKED"


def _results(text: str, kind: str) -> set[str]:
    return {" ".join(edit.of(text).split()) for edit in sql.edits(text) if edit.kind == kind}


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (
            _CONDITIONS,
            "condition dropped",
            {
                _CONDITIONS.replace("a = 1", "true"),
                _CONDITIONS.replace("b < 2", "true"),
                "SELECT * FROM t WHERE a = 1 AND b < 2 AND true",
                _CONDITIONS.replace("c OR", "false OR"),
                _CONDITIONS.replace("OR d", "OR false"),
            },
        ),
        # Of a condition that is dropped, only the boundary is turned as well.
        (_CONDITIONS, "NOT dropped", set()),
        (_CONDITIONS, "comparison", {_CONDITIONS.replace("<", "<=")}),
        ("SELECT NOT a, b = 1, c < 2 FROM t", "NOT dropped", {"SELECT a, b = 1, c < 2 FROM t"}),
        (
            "SELECT NOT a, b = 1, c < 2 FROM t",
            "comparison",
            {
                "SELECT NOT a, b <> 1, c < 2 FROM t",
                "SELECT NOT a, b = 1, c <= 2 FROM t",
                "SELECT NOT a, b = 1, c >= 2 FROM t",
            },
        ),
        # An assignment is no comparison.
        (
            "UPDATE t SET a = b, c = (d IS NULL)",
            "comparison",
            {"UPDATE t SET a = b, c = (d IS NOT NULL)"},
        ),
        (
            _UPDATE,
            "assignment dropped",
            {_UPDATE.replace("a = b, ", ""), "UPDATE t SET a = b FROM u WHERE e IS NULL"},
        ),
        (_CLAIM, "lock removed", {_CLAIM.partition(" FOR")[0]}),
        (_CLAIM, "lock changed", {_CLAIM.replace(" SKIP LOCKED", "")}),
        (_CLAIM, "order turned", {_CLAIM.replace("BY a", "BY a DESC")}),
        (
            "SELECT min(pg_snapshot_xmin(a)) FROM t",
            "exchanged",
            {"SELECT max(pg_snapshot_xmin(a)) FROM t", "SELECT min(pg_snapshot_xmax(a)) FROM t"},
        ),
        ("SELECT coalesce(a, f(b, c), 0)", "default dropped", {"SELECT coalesce(a)"}),
        (
            "SET LOCAL lock_timeout = '5s'; LOCK TABLE t IN SHARE MODE",
            "statement removed",
            {"SELECT 1; LOCK TABLE t IN SHARE MODE", "SET LOCAL lock_timeout = '5s'; SELECT 1"},
        ),
        # BETWEEN has its own AND; literals, parameters and comments are left alone.
        (
            "SELECT a FROM t WHERE a BETWEEN 1 AND 2 -- b = 1 AND c\n AND b = %(b)s",
            "condition dropped",
            {
                "SELECT a FROM t WHERE true -- b = 1 AND c AND b = %(b)s",
                "SELECT a FROM t WHERE a BETWEEN 1 AND 2 -- b = 1 AND c AND true",
            },
        ),
        ("SELECT b = 'x < y', {c}", "comparison", {"SELECT b <> 'x < y', {c}"}),
    ],
)
def test_a_statement_has_these_mutants(text: str, kind: str, expected: set[str]) -> None:
    """Guards against conditions that are never turned around, so that no test is missed."""
    assert _results(text, kind) == expected


def test_the_catalog_has_the_faults_that_were_planted() -> None:
    """Guards against a catalog that leaves out what once survived every test."""
    shown = "\n".join(str(mutant) for area in catalog.AREAS for mutant in catalog.of_area(area))
    for one in (
        "partitions_sql.py:BEHIND:exchanged:",
        "[pg_snapshot_xmin → pg_snapshot_xmax]",
        "synchronous_commit",
        "client.py:_FIXED:setting-changed:",
        "[0 → 60_000]",
        "parking/parking_sql.py:REPLAYS:condition-dropped:",
        "[{MINE} → true]",
        "existing/existing_sql.py:BEGIN:statement-removed:",
        # No sign of SQL but a placeholder.
        "ORDER BY tx [nothing → DESC]",
    ):
        assert one in shown


def test_ids_are_distinct_and_have_no_lines() -> None:
    """Guards against an explanation of an equal mutant that another change of the file makes stale."""
    text = 'A: Final = "SELECT a FROM t WHERE b = 1 AND c = 1"\n'
    assert len({mutant.id for mutant in catalog.of_text("x.py", text)}) == len(
        {mutant.id for mutant in catalog.of_text("x.py", "\n\n" + text)}
        | {mutant.id for mutant in catalog.of_text("x.py", text)}
    )


def test_a_patch_reaches_what_others_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a mutant that is not there, and survives."""
    from outbox_pipelines.relay import relay_sql
    from outbox_pipelines.relay.parking import parking_sql

    before = relay_sql.MINE
    for module in (relay_sql, parking_sql):
        for name, value in vars(module).items():
            if isinstance(value, str) and not name.startswith("__"):
                monkeypatch.setattr(module, name, value)
    file = "outbox_pipelines/relay/relay_sql.py"
    source = (catalog.ROOT / file).read_text(encoding="utf-8")
    patch.apply(file, source.replace("%(shards)s = 1 OR", "%(shards)s = 7 OR"))
    assert before not in parking_sql.REPLAYS
    assert "= 7 OR" in parking_sql.REPLAYS
    patch.apply(file, source)
    assert before in parking_sql.REPLAYS
