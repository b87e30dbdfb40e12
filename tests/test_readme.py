"""The README says what there is: settings and benchmarks, by name."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import _PARTS
from outbox_pipelines.settings import Settings

README = (Path(__file__).parents[1] / "README.md").read_text()


def _settings() -> set[str]:
    """As the environment has them."""
    return {field.alias or f"OUTBOX_{name.upper()}" for name, field in Settings.model_fields.items()} | {
        "OUTBOX_SETTINGS"
    }


def test_every_setting_is_in_the_table() -> None:
    """Guards against a setting that nobody finds, and one that is gone."""
    chapter = README.partition("## Settings")[2].partition("\n## ")[0]
    assert set(re.findall(r"OUTBOX_[A-Z_]+\b", chapter)) == _settings()


def test_every_benchmark_is_named() -> None:
    listed = re.search(r'BENCH="peers latency" for a part: (.*?)\)', README, re.DOTALL)
    assert listed is not None
    assert set(listed[1].replace("#", "").split()) == set(_PARTS)
