"""Ticks of sensors, for one outbox or several, and of schedules; and when a tick reports a check again.

Invariants:
- A tick never fails: Dagster keeps the stack trace of each failed one permanently. What is wrong with an
  outbox is the reason of a skipped tick, in short, and its check `database`; the other outboxes go on.
- An outbox with an error is tried again after a pause that doubles; what is logged is logged once.
- A tick ends in time: outboxes that it does not reach are first in the next one.
- Databases are read in threads, so that one that does not answer delays no other outbox. Everything that uses
  Dagster runs in the tick's own thread.
- A check is reported again at a change, otherwise rarely, since such entries are never removed. A change for
  the worse is always reported at once: no failure is hidden by an earlier result.
- Other changes are reported at once, too, unless ten changes were reported within an hour. Then they wait for
  an hour at most, and the result of that time is reported.
- A result that stays the same costs one entry a day; one whose numbers change, one an hour in the long run.
- What Dagster shows counts as reported, also if a run reported it between two ticks.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar

import dagster as dg

from outbox_pipelines.defs import pages
from outbox_pipelines.defs.outbox import Outbox, plain_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.quality.measurements import Measurements
    from outbox_pipelines.settings import Settings

SHARED: Final = "outboxes_"
"""Before the name of a sensor of several outboxes."""
# A thread waits for a database, at most ten seconds for one that does not answer.
_THREADS: Final = 16
# Dagster abandons a tick after 60 s, and what it found is lost.
_SECONDS: Final = 35.0
# The pause after the first error, and the longest one, in seconds: so late is a correction seen.
_FIRST_PAUSE: Final = 10.0
_LONGEST_PAUSE: Final = 60.0
_NO_ERROR: Final = (0.0, 0.0, "")
# Of a reason. A tick with a reason of this length takes 0.9 KB of Dagster's storage.
_CHARACTERS: Final = 200
_NAMED: Final = 3
_LOG: Final = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tick:
    """What a tick found for one outbox."""

    reason: str
    """Shown if nothing is launched."""
    cursor: str | None = None
    requests: Sequence[dg.RunRequest] = ()
    events: Sequence[Any] = ()
    is_wrong: bool = False
    """Whether the reason is shown before those of other outboxes."""


class Reading:
    """An outbox during a tick: its settings and measurements, read once, or the errors instead."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox

    def settings(self) -> Settings:
        """Return the settings, or raise a `SetupError`."""
        return _value_of(self._settings)

    def measurements(self) -> Measurements:
        """Return the measurements, or raise a `SetupError` or psycopg's error."""
        return _value_of(self._measurements)

    @cached_property
    def _settings(self) -> Settings | Exception:
        try:
            return self.outbox.load_settings()
        except SetupError as error:
            return error

    @cached_property
    def _measurements(self) -> Measurements | Exception:

        try:
            settings = self.settings()
            return kinds.of(settings).measure(settings)
        except Exception as error:  # noqa: BLE001 - raised again by `measurements`
            return error


One = Callable[[dg.SensorEvaluationContext, Reading, str | None], Tick]


def sensor(
    outboxes: Sequence[Outbox],
    name: str,
    one: One,
    *,
    seconds: int,
    description: str,
    jobs: Sequence[Any] = (),
    reads: Callable[[Settings], bool] | None = None,
) -> dg.SensorDefinition:
    """Return a sensor that runs `one` for each outbox.

    Args:
        name: of a sensor of the outbox named `outbox`.
        seconds: the shortest time between two ticks.
        jobs: what it launches.
        reads: whether `one` needs the measurements.
    """

    first = outboxes[0]
    is_shared = len(outboxes) > 1

    @dg.sensor(
        name=f"{SHARED}{name}" if is_shared else first.name_of(name),
        jobs=jobs or None,
        minimum_interval_seconds=seconds,
        default_status=first.sensor_status,
        description=plain_line(_SHARED + description) if is_shared else first.line(description),
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        found = _joined(context, outboxes, one, reads)
        return dg.SensorResult(
            run_requests=list(found.requests),
            skip_reason=None if found.requests else dg.SkipReason(found.reason),
            asset_events=list(found.events),
            cursor=found.cursor,
        )

    return tick


def schedule(
    outbox: Outbox,
    name: str,
    cron: str,
    description: str,
    one: Callable[[dg.ScheduleEvaluationContext, Settings], Requests],
    *,
    job: str = "",
    of_days: bool = False,
) -> dg.ScheduleDefinition:
    """Return a schedule, in UTC.

    Args:
        name: without prefix, and so is that of the job.
        one: returns what to launch, or why nothing.
        job: by default, that of the schedule's name.
        of_days: nothing is launched for a table without days.
    """

    @dg.schedule(**outbox.timing(name, cron, description, job))
    def tick(context: dg.ScheduleEvaluationContext) -> Any:
        try:
            settings = outbox.load_settings()
            if of_days and not kinds.of(settings).has_days:
                return dg.SkipReason("an existing table (OUTBOX_TABLE) has no days")
            return one(context, settings)
        except Exception as error:  # noqa: BLE001 - the reason of a skipped tick
            _log_place(outbox, error)
            return dg.SkipReason(short(_why(outbox, error)))

    return tick


Requests = dg.RunRequest | list[dg.RunRequest] | dg.SkipReason
_SHARED: Final = "For all outboxes of this code location, each by its own settings. "


def _joined(
    context: dg.SensorEvaluationContext,
    outboxes: Sequence[Outbox],
    one: One,
    reads: Callable[[Settings], bool] | None,
) -> Tick:
    kept = json.loads(context.cursor) if context.cursor else {}
    cursors: dict[str, str | None] = kept.get("cursors", {})
    # The pause after the last error, when the next attempt is, and a digest of the error: a cursor is stored
    # with each tick.
    errors: dict[str, tuple[float, float, str]] = kept.get("errors", {})
    now = time.time()
    # A pause that is longer than the longest one began before the clock was set back.
    paused = {name for name, (_, due, _) in errors.items() if 0.0 < due - now <= _LONGEST_PAUSE}
    started = time.monotonic()
    readings = _readings([outbox for outbox in outboxes if outbox.name not in paused], cursors, reads)
    found: dict[str, Tick] = {}
    reasons: list[tuple[str, str]] = []
    for reading in readings:
        name = reading.outbox.name
        if time.monotonic() - started > _SECONDS:
            reasons.append((name, "no time in this tick; first in the next"))
            continue
        cursor = cursors.pop(name, None)
        try:
            found[name] = one(context, reading, cursor)
        except Exception as error:  # noqa: BLE001 - reported, and the others go on
            pause, _, before = errors.get(name, _NO_ERROR)
            why = _why(reading.outbox, error)
            if (seen := blake2b(why.encode(), digest_size=4).hexdigest()) != before:
                context.log.error(why if name in why else f"outbox {name}: {why}")
                _log_place(reading.outbox, error)
            pause = min(2 * pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            errors[name] = (pause, now + pause, seen)
            cursors[name] = cursor
            reasons.append((name, f"{short(why)} (next attempt in {pause:.0f} s)"))
        else:
            errors.pop(name, None)
            cursors[name] = found[name].cursor
    known = {outbox.name for outbox in outboxes}
    errors = {name: error for name, error in errors.items() if name in known}
    tried = {name for name, _ in reasons}
    reasons += [(name, "waits after an error") for name in errors if name not in tried]
    quiet = [name for name, tick in found.items() if not tick.requests]
    reasons += [
        (name, found[name].reason) for name in sorted(quiet, key=lambda name: not found[name].is_wrong)
    ]
    return Tick(
        _summary(reasons, has_names=len(outboxes) > 1),
        json.dumps(
            {"cursors": {name: cursor for name, cursor in cursors.items() if name in known}, "errors": errors}
        ),
        [request for tick in found.values() for request in tick.requests],
        [event for tick in found.values() for event in tick.events],
    )


def _readings(
    outboxes: Sequence[Outbox], cursors: Mapping[str, object], reads: Callable[[Settings], bool] | None
) -> list[Reading]:
    """Return what was read of each outbox, first of those that the last tick had no time for."""
    # A cursor moves to the end when it is used.
    ranks = {name: rank for rank, name in enumerate(cursors, 1)}
    readings = [Reading(each) for each in sorted(outboxes, key=lambda outbox: ranks.get(outbox.name, 0))]
    if reads is not None:
        with ThreadPoolExecutor(_THREADS, "outbox-reading") as threads:
            list(threads.map(lambda reading: _read(reading, reads), readings))
    return readings


def _summary(reasons: Sequence[tuple[str, str]], *, has_names: bool) -> str:
    """Return the reasons of a tick: the first ones, and how many outboxes more there are."""
    if not has_names:
        return "; ".join(reason for _, reason in reasons)
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        by_reason.setdefault(reason, []).append(name)
    shown = list(by_reason.items())[:_NAMED]
    more = len(reasons) - sum(len(names) for _, names in shown)
    return "; ".join(
        [f"{listed(names)}: {reason}" for reason, names in shown]
        + ([f"{more} more outboxes"] if more else [])
    )


def listed(names: Sequence[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _why(outbox: Outbox, error: Exception) -> str:
    """Return an error in one line; only the kind of an unexpected one, which may repeat a secret."""
    if (said := pages.said(outbox, error)) is not None:
        return said
    return f"{type(error).__name__}: see the code server's log"


def _log_place(outbox: Outbox, error: Exception) -> None:
    """Log where an unexpected error was raised, without its text."""
    if pages.said(outbox, error) is None:
        place = "".join(traceback.format_tb(error.__traceback__))
        _LOG.error("outbox %s: %s in a tick\n%s", outbox.name, type(error).__name__, place)


def short(text: str) -> str:
    """Return a text that fits into the reason of a tick."""
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"


def _read(reading: Reading, reads: Callable[[Settings], bool]) -> None:
    """Read the measurements ahead; errors are raised when they are used."""
    try:
        if reads(reading.settings()):
            _ = reading._measurements
    except SetupError:
        return


def _value_of(found: T | Exception) -> T:
    if isinstance(found, Exception):
        raise found
    return found


HOUR: Final = 3_600.0
DAY: Final = 86_400.0
_FIRST_REPORT_PAUSE: Final = 60.0
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
        return since >= min(max(self.at - self.changes[-1], _FIRST_REPORT_PAUSE), HOUR)

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


def due(
    instance: dg.DagsterInstance,
    last: dict[str, Reported],
    results: dict[dg.AssetCheckKey, dict[str, Any]],
    now: float,
) -> list[dg.AssetCheckEvaluation]:
    """Return the results that are to be reported now, and remember them.

    Args:
        last: by the checks' names.
        results: arguments of an evaluation.
    """
    from outbox_pipelines.defs.dagster_internals import latest_results

    for key, shown in latest_results(instance, [*results]).items():
        if last[key.name].status is not None:
            last[key.name].status = _status_of(shown.passed, shown.severity)
    found = []
    for key, result in results.items():
        state = _status_of(result["passed"], result["severity"])
        if last[key.name].is_due(state, result["description"], now):
            last[key.name].report(state, result["description"], now)
            found.append(dg.AssetCheckEvaluation(asset_key=key.asset_key, check_name=key.name, **result))
    return found


def _status_of(passed: bool, severity: dg.AssetCheckSeverity) -> Status:
    """Return the status of a check's result."""
    if passed:
        return Status.OK
    return Status.WARN if severity is dg.AssetCheckSeverity.WARN else Status.ERROR
