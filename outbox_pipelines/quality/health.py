"""The checks of an outbox, evaluated by Great Expectations: what Dagster's checks report.

Invariants:
- Rows, thresholds and texts are those of `rules.py`, so that the checks and `outbox status` agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from outbox_pipelines.quality import expectations
from outbox_pipelines.quality.measured import Measurements
from outbox_pipelines.quality.rules import CheckResult, judge
from outbox_pipelines.settings import Settings

SUITE: Final = "outbox_health"


def evaluate(settings: Settings, found: Measurements) -> list[CheckResult]:
    """Return the results of the checks."""
    results = judge(settings, found)
    statuses = expectations.validate(SUITE, *suite_of(results))
    return [replace(result, status=statuses.get(result.rule.name, result.status)) for result in results]


def build_docs(settings: Settings, found: Measurements, directory: Path) -> Path:
    """Write Great Expectations' pages of the results; return the first page."""
    results = judge(settings, found)
    return expectations.data_docs(directory, {SUITE: suite_of(results)})


def suite_of(results: Sequence[CheckResult]) -> tuple[dict[str, float], list[expectations.Expected]]:
    """Return the row of the frame, and what is expected of it."""
    row = {result.rule.name: result.value for result in results}
    return row, expectations.of_rules(result.rule for result in results)
