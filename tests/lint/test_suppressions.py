"""Comments `# outbox: ignore[…]`: what they suppress, and that none stays without a reason."""

from __future__ import annotations

import pytest

from outbox_pipelines.lint.linter import Options, check_sources

HEAD = "import psycopg\nfrom outbox_pipelines.writer import emit\nc = psycopg.connect('', autocommit=True)\n"
CALL = 'emit(c, "order", 1, "e", {})'


def found(source: str, **options: frozenset[str]) -> list[tuple[int, str]]:
    findings = check_sources({"a.py": (HEAD + source).encode()}, Options(**options))  # type: ignore[arg-type]
    return [(finding.line - 3, finding.code) for finding in findings]


@pytest.mark.parametrize(
    "source",
    [
        f"{CALL}  # outbox: ignore[OB001]",
        f"{CALL}  # outbox: ignore",
        f"{CALL}  # noqa: X # outbox:ignore[OB008, OB001]",
        'emit(\n    c, "order", 1, "e", {}\n)  # outbox: ignore[OB001]',
        'emit(  # outbox: ignore[OB001]\n    c, "order", 1, "e", {}\n)',
    ],
)
def test_suppressed(source: str) -> None:
    """Guards against a comment that no longer counts after a formatter moved it to another line of the
    call."""
    assert found(source) == []


@pytest.mark.parametrize(
    ("source", "left"),
    [
        (f"{CALL}  # outbox: ignore[OB008]", [(1, "OB001"), (1, "OB009")]),
        (f"# outbox: ignore[OB001]\n{CALL}", [(1, "OB009"), (2, "OB001")]),
        ("pass  # outbox: ignore", [(1, "OB009")]),
        (f"{CALL}  # outbox: ignore[OB001, OB999]", [(1, "OB009")]),
        (f'{CALL}; "# outbox: ignore"', [(1, "OB001")]),
    ],
)
def test_not_suppressed(source: str, left: list[tuple[int, str]]) -> None:
    """Guards against a comment for another line or rule that hides a mistake, and one that stays when the
    mistake is gone."""
    assert found(source) == left


def test_a_rule_that_was_not_asked_for() -> None:
    """Guards against comments called unused because their rule was left out this time."""
    assert found(f"{CALL}  # outbox: ignore[OB001]", selected=frozenset({"OB008", "OB009"})) == []
    assert found("pass  # outbox: ignore", selected=frozenset({"OB008", "OB009"})) == []
