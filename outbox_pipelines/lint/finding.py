"""Findings and rules: a rule has a stable code, a name and a correction; and comments that accept findings.

Invariants:
- A comment that suppresses nothing is a finding, unless one of its rules is not selected.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

_COMMENT = re.compile(r"#\s*outbox:\s*ignore\b(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class Rule:
    """A rule of the linter. Its code never changes its meaning."""

    code: str
    name: str
    remedy: str


@dataclass(frozen=True, order=True)
class Finding:
    """A finding at a place. Lines and columns count from 1; `last_line` is the end of the expression."""

    path: str
    line: int
    column: int
    code: str
    name: str
    why: str
    remedy: str
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
UNDOCUMENTED: Final = Rule(
    "OB012", "undocumented-event-type", "add it to the event catalog, or correct the name"
)
NOT_WRITTEN: Final = Rule(
    "OB013", "event-type-not-written", "write it, or give it the lifecycle proposed, deprecated or retired"
)
HIDDEN: Final = Rule("OB014", "event-type-not-in-sight", "compare it with the event catalog yourself")

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
        UNDOCUMENTED,
        NOT_WRITTEN,
        HIDDEN,
    )
}
# The rules selected by default; the last ones need an event catalog.
DEFAULT: Final = frozenset(RULES) - {each.code for each in (APART, UNDOCUMENTED, NOT_WRITTEN, HIDDEN)}


def at(path: str, node: ast.expr | ast.stmt, rule: Rule, why: str) -> Finding:
    """Return a finding at a node."""
    last = node.end_lineno or node.lineno
    return Finding(path, node.lineno, node.col_offset + 1, rule.code, rule.name, why, rule.remedy, last)


@dataclass(frozen=True)
class _Ignore:
    line: int
    column: int
    codes: frozenset[str]
    """Empty for all."""

    def covers(self, finding: Finding) -> bool:
        return finding.line <= self.line <= finding.last_line and (
            not self.codes or finding.code in self.codes
        )


def apply(source: bytes, path: str, findings: list[Finding], selected: Collection[str]) -> list[Finding]:
    """Return the findings that no comment suppresses, and the comments that suppress none."""
    ignores = list(_ignores(source)) if b"outbox:" in source else []
    left = [finding for finding in findings if not any(one.covers(finding) for one in ignores)]
    for ignore in ignores:
        asked = ignore.codes <= set(selected) if ignore.codes else set(selected) >= DEFAULT
        unknown = ignore.codes - set(RULES)
        if unknown or (asked and not any(ignore.covers(finding) for finding in findings)):
            why = f"unknown rule {', '.join(sorted(unknown))}" if unknown else "no finding here"
            left.append(
                Finding(
                    path,
                    ignore.line,
                    ignore.column,
                    UNUSED.code,
                    UNUSED.name,
                    why,
                    UNUSED.remedy,
                    ignore.line,
                )
            )
    return left


def _ignores(source: bytes) -> Iterator[_Ignore]:
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT and (found := _COMMENT.search(token.string)):
            codes = frozenset(code.strip() for code in (found.group(1) or "").split(",")) - {""}
            yield _Ignore(token.start[0], token.start[1] + found.start() + 1, codes)
