"""When a sensor reports a check again: at a change, otherwise rarely, since such entries are never removed.

Invariants:
- A change for the worse is always reported at once: no failure is hidden by an earlier result.
- Other changes are reported at once, too, unless ten changes were reported within an hour. Then they wait for
  an hour at most, and the result of that time is reported.
- A result that stays the same costs one entry a day; one whose numbers change, one an hour in the long run.
- What Dagster shows counts as reported, also if a run reported it between two ticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import dagster as dg

from outbox_pipelines.quality.rules import Status

HOUR: Final = 3_600.0
DAY: Final = 86_400.0
_FIRST_PAUSE: Final = 60.0
_CHANGES_AN_HOUR: Final = 10
# With the letter of a plural, which depends on them.
_NUMBERS: Final = re.compile(r"[\d.,]+|s\b")


@dataclass(slots=True)
class Reported:
    """What was last reported of a check."""

    status: int | None = None
    """0 for passed; None before the first report."""
    text: str = ""
    at: float = 0.0
    """Unix time."""
    changes: list[float] = field(default_factory=list)
    """Times of the last changes, the newest last."""

    def is_due(self, status: int, text: str, now: float) -> bool:
        """Return whether to report this result now."""
        since = now - self.at
        if self._is_changed(status, text):
            if self.status is not None and status > self.status:
                return True
            return len(self.changes) < _CHANGES_AN_HOUR or now - self.changes[0] >= HOUR
        if status == 0 or text == self.text:
            return since >= DAY
        # Doubles, up to an hour: a report after each pause that is as long as all before it.
        return since >= min(max(self.at - self.changes[-1], _FIRST_PAUSE), HOUR)

    def report(self, status: int, text: str, now: float) -> None:
        """Remember that this result was reported."""
        if self._is_changed(status, text):
            self.changes = [*self.changes, now][-_CHANGES_AN_HOUR:]
        self.status, self.text, self.at = status, text, now

    def _is_changed(self, status: int, text: str) -> bool:
        """Return whether more than numbers differ, for example the reason of a failure."""
        if status != self.status:
            return True
        return status != 0 and _NUMBERS.sub("", text) != _NUMBERS.sub("", self.text)


def correct(
    instance: dg.DagsterInstance, reported: dict[str, Reported], checks: Iterable[dg.AssetCheckKey]
) -> None:
    """Replace each status that is remembered, under the check's name, by that of the check's last result."""
    from outbox_pipelines.defs.dagster_internals import latest_results

    for key, result in latest_results(instance, [*checks]).items():
        if reported[key.name].status is not None:
            reported[key.name].status = status_of(result.passed, result.severity)


def status_of(passed: bool, severity: dg.AssetCheckSeverity) -> Status:
    """Return the status of a check's result."""
    if passed:
        return Status.OK
    return Status.WARN if severity is dg.AssetCheckSeverity.WARN else Status.ERROR
