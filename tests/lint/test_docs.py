"""The examples of docs/lint-writes.md: each bad one is found by its own rule, no good one by any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from outbox_pipelines.lint.finding import RULES
from outbox_pipelines.lint.linter import Options, check_sources

TEXT = (Path(__file__).parents[2] / "docs" / "lint-writes.md").read_text()
_PART = re.compile(r"^### (OB\d+)|^```python\n# (bad|good)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, str]]:
    """Code, kind and source of each example."""
    found, code = [], ""
    for part in _PART.finditer(TEXT):
        code = part.group(1) or code
        if part.group(2):
            found.append((code, part.group(2), part.group(3)))
    return found


@pytest.mark.parametrize(("code", "kind", "source"), examples(), ids=lambda value: value[:5].strip())
def test_examples(code: str, kind: str, source: str) -> None:
    """Guards against documentation whose bad example passes, or whose correction is reported in its turn."""
    found = [
        finding.code for finding in check_sources({"example.py": source.encode()}, Options(frozenset(RULES)))
    ]
    assert found == ([code] if kind == "bad" else [])


def test_the_hook_that_is_shown_exists() -> None:
    """Guards against an id that pre-commit does not find."""
    [example] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    [[shown]] = [each["hooks"] for each in yaml.safe_load(example)["repos"]]
    hooks = yaml.safe_load((Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text())
    assert [each["id"] for each in hooks] == [shown["id"]]
    assert shown.keys() <= {"id", "args"}


def test_every_rule_has_its_name_and_most_have_an_example() -> None:
    """Guards against a rule that is reported and explained nowhere."""
    shown = {code for code, kind, _ in examples() if kind == "bad"}
    for rule in RULES.values():
        assert f"{rule.code} {rule.name}" in TEXT
    assert RULES.keys() - shown == {
        "OB000",
        "OB002",
        "OB003",
        "OB004",
        "OB005",
        "OB007",
        "OB008",
        "OB009",
        "OB011",
        "OB012",
        "OB013",
        "OB014",
    }
