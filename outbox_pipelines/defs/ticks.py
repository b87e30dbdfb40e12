"""Sensors that serve one outbox or several: a tick for each outbox, and how their results are joined.

Invariants:
- An error of the only outbox fails the tick. An error of one of several is logged with the outbox's name, and
  the others go on.
- A tick ends in time: outboxes that it does not reach are first in the next one.
- Databases are read in threads, so that one that does not answer delays no other outbox. Everything that uses
  Dagster runs in the tick's own thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import dagster as dg

from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.quality.measured import Measurements
    from outbox_pipelines.settings import Settings

SHARED: Final = "outboxes_"
"""Before the name of a sensor of several outboxes."""
# A thread waits for a database, at most ten seconds for one that does not answer.
_THREADS: Final = 16
# Dagster abandons a tick after 60 s, and what it found is lost.
_SECONDS: Final = 35.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tick:
    """What a tick found for one outbox."""

    reason: str
    """Shown if nothing is launched."""
    cursor: str | None = None
    requests: Sequence[dg.RunRequest] = ()
    events: Sequence[Any] = ()


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
        # Imported here so that definitions load without the drivers.
        from outbox_pipelines.relay import measuring

        try:
            return measuring.read(self.settings())
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

    @dg.sensor(
        name=outboxes[0].name_of(name) if len(outboxes) == 1 else f"{SHARED}{name}",
        jobs=jobs or None,
        minimum_interval_seconds=seconds,
        default_status=outboxes[0].sensor_status,
        description=outboxes[0].text(description)
        if len(outboxes) == 1
        else _of_several(outboxes, description),
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        if len(outboxes) == 1:
            return _result(one(context, Reading(outboxes[0]), context.cursor))
        return _result(_joined(context, outboxes, one, reads))

    return tick


def _of_several(outboxes: Sequence[Outbox], description: str) -> str:
    names = ", ".join(f"`{outbox.name}`" for outbox in outboxes)
    return f"For the outboxes {names}, each by its own settings.\n\n{description}"


def _result(tick: Tick) -> dg.SensorResult:
    return dg.SensorResult(
        run_requests=list(tick.requests),
        skip_reason=None if tick.requests else dg.SkipReason(tick.reason),
        asset_events=list(tick.events),
        cursor=tick.cursor,
    )


def _joined(
    context: dg.SensorEvaluationContext,
    outboxes: Sequence[Outbox],
    one: One,
    reads: Callable[[Settings], bool] | None,
) -> Tick:
    cursors: dict[str, str | None] = json.loads(context.cursor) if context.cursor else {}
    # Those that the last tick had no time for come first: a cursor moves to the end when it is used.
    ranks = {name: rank for rank, name in enumerate(cursors, 1)}
    readings = [Reading(each) for each in sorted(outboxes, key=lambda each: ranks.get(each.name, 0))]
    started = time.monotonic()
    if reads is not None:
        with ThreadPoolExecutor(_THREADS, "outbox-reading") as threads:
            list(threads.map(lambda reading: _read(reading, reads), readings))
    reasons: dict[str, list[str]] = {}
    requests: list[dg.RunRequest] = []
    events: list[Any] = []
    for reading in readings:
        name = reading.outbox.name
        if time.monotonic() - started > _SECONDS:
            reasons.setdefault("no time in this tick; first in the next", []).append(name)
            continue
        cursor = cursors.pop(name, None)
        try:
            found = one(context, reading, cursor)
        except Exception as error:  # noqa: BLE001 - reported, and the others go on
            # Other errors may repeat a connection string.
            why = (
                str(error)
                if isinstance(error, SetupError)
                else f"{type(error).__name__}: see the code server"
            )
            context.log.error(why if name in why else f"outbox {name}: {why}")
            reasons.setdefault(why, []).append(name)
            cursors[name] = cursor
            continue
        cursors[name] = found.cursor
        requests.extend(found.requests)
        events.extend(found.events)
        if not found.requests:
            reasons.setdefault(found.reason, []).append(name)
    known = {outbox.name for outbox in outboxes}
    return Tick(
        "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()),
        json.dumps({name: cursor for name, cursor in cursors.items() if name in known}),
        requests,
        events,
    )


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
