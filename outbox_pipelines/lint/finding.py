"""Findings and rules: a rule has a stable code, a name, and the correction to make."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Rule:
    """A rule of the linter. Its code never changes its meaning."""

    code: str
    name: str
    mend: str


@dataclass(frozen=True, order=True)
class Finding:
    """A finding at a place. Lines and columns count from 1; `last_line` is the end of the expression."""

    path: str
    line: int
    column: int
    code: str
    name: str
    why: str
    mend: str
    last_line: int


UNREADABLE: Final = Rule("OB000", "unreadable", "correct the file, or exclude it")
OUTSIDE: Final = Rule(
    "OB001",
    "emit-outside-transaction",
    "write rows and event inside one transaction block on that connection",
)
AFTER_COMMIT: Final = Rule("OB002", "emit-after-commit", "emit before the commit of the rows it describes")
ELSEWHERE: Final = Rule(
    "OB003", "emit-on-another-connection", "pass `emit` the connection or session that writes the rows"
)
NOT_AWAITED: Final = Rule("OB004", "emit-not-awaited", "await it")
SWALLOWED: Final = Rule(
    "OB005",
    "emit-swallowed",
    "let the error end the transaction, or put the whole transaction into the `try`",
)
DUAL_WRITE: Final = Rule(
    "OB006",
    "publish-before-commit",
    "replace the publish by `emit` in the same transaction; the relay publishes",
)
PAST_HELPER: Final = Rule("OB007", "insert-past-helper", "use `emit`, or `emit_many` for a batch")
CHANGED: Final = Rule(
    "OB008", "outbox-row-changed", "do not change the rows; the relay's position marks what is published"
)
UNUSED: Final = Rule("OB009", "unused-ignore", "remove the comment")
IN_HOOK: Final = Rule(
    "OB010",
    "publish-in-model-hook",
    "write the event with `emit` in the transaction that saves the row; the relay publishes",
)
APART: Final = Rule(
    "OB011",
    "publish-beside-commit",
    "replace the publish by `emit` before the commit; the relay publishes",
)

RULES: Final = {
    rule.code: rule
    for rule in (
        UNREADABLE,
        OUTSIDE,
        AFTER_COMMIT,
        ELSEWHERE,
        NOT_AWAITED,
        SWALLOWED,
        DUAL_WRITE,
        PAST_HELPER,
        CHANGED,
        UNUSED,
        IN_HOOK,
        APART,
    )
}
# The rules selected by default.
DEFAULT: Final = frozenset(RULES) - {APART.code}


def at(path: str, node: ast.expr | ast.stmt, rule: Rule, why: str) -> Finding:
    """Return a finding at a node."""
    last = node.end_lineno or node.lineno
    return Finding(path, node.lineno, node.col_offset + 1, rule.code, rule.name, why, rule.mend, last)
