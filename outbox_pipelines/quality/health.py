"""The checks of an outbox, evaluated by Great Expectations: what Dagster's checks report.

Invariants:
- Rows, thresholds and texts are those of `rules.py`, so that the checks and `outbox status` agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from outbox_pipelines.quality import expectations, measurements
from outbox_pipelines.quality.measured import Measurements
from outbox_pipelines.quality.rules import Verdict, judge
from outbox_pipelines.settings import Settings

SUITE: Final = "outbox_health"


def evaluate(settings: Settings) -> tuple[Measurements, list[Verdict]]:
    """Measure, and return the results of the checks.

    Raises:
        SetupError: the database is unavailable, or has no outbox.
    """
    found = measurements.read(settings)
    verdicts = judge(settings, found)
    states = expectations.validate(SUITE, *suite_of(verdicts))
    return found, [
        replace(verdict, state=states.get(verdict.rule.name, verdict.state)) for verdict in verdicts
    ]


def build_docs(settings: Settings, directory: Path) -> Path:
    """Write Great Expectations' pages of the current results; return the first page.

    Raises:
        SetupError: as `evaluate`.
    """
    verdicts = judge(settings, measurements.read(settings))
    return expectations.data_docs(directory, {SUITE: suite_of(verdicts)})


def suite_of(verdicts: Sequence[Verdict]) -> tuple[dict[str, float], list[expectations.Expected]]:
    """Return the row of the frame, and what is expected of it."""
    row = {verdict.rule.name: verdict.value for verdict in verdicts}
    return row, expectations.of_rules(verdict.rule for verdict in verdicts)
