"""One place knows which kind of table is relayed, one parses settings, and parts receive groups of them."""

from __future__ import annotations

import re
from pathlib import Path

import outbox_pipelines

PACKAGE = Path(outbox_pipelines.__file__).parent


def _readers(settings: str) -> set[str]:
    """Return the files of the package that read one of these settings."""
    pattern = re.compile(rf"settings\.({settings})\b")
    return {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())
    }


def test_one_place_chooses_the_kind() -> None:
    """Guards against branches on the kind all over the package: others ask `kinds.of(settings)`."""
    assert _readers("table") == {"relay/kinds.py", "config/parsed.py"}


def test_one_place_parses() -> None:
    """Guards against settings that are parsed in several ways."""
    names = "kafka_config|consumers|header_names|flat_members|warn_at|error_at"
    assert _readers(names) == {"config/parsed.py"}
    assert _readers("event_types|aggregate_types") == {"config/rules.py"}


def test_parts_receive_their_groups() -> None:
    """Guards against parts that can read every setting: types know which group each one has."""
    whole = re.compile(r"^\s*from outbox_pipelines\.settings import .*(?<![A-Za-z])Settings\b", re.MULTILINE)
    entries = ("cli/", "defs/", "settings.py", "outboxes.py")
    found = {
        path
        for each in PACKAGE.rglob("*.py")
        if not (path := str(each.relative_to(PACKAGE))).startswith(entries) and whole.search(each.read_text())
    }
    # They compare consumers with days and messages, and load settings themselves.
    assert found == {"reconciliation/steps.py", "existing/adopt/migrating.py"}
