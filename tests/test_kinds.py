"""One place knows which kind of table is relayed, and one parses what settings say."""

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
    names = "kafka_config|topic_map|consumers|header_names|flat_members|warn_at|error_at"
    assert _readers(names) == {"config/parsed.py"}
