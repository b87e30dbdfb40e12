"""Comments `# outbox: ignore[OB001]`, which accept a finding on the lines of the call.

Invariants:
- A comment that suppresses nothing is a finding, unless one of its rules is not selected.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from outbox_pipelines.lint.finding import DEFAULT, RULES, UNUSED, Finding

_COMMENT = re.compile(r"#\s*outbox:\s*ignore\b(?:\[([^\]]*)\])?")


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
                    path, ignore.line, ignore.column, UNUSED.code, UNUSED.name, why, UNUSED.mend, ignore.line
                )
            )
    return left


def _ignores(source: bytes) -> Iterator[_Ignore]:
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT and (found := _COMMENT.search(token.string)):
            codes = frozenset(code.strip() for code in (found.group(1) or "").split(",")) - {""}
            yield _Ignore(token.start[0], token.start[1] + found.start() + 1, codes)
