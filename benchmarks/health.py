"""What it costs to watch: measuring beside 1 and 10 million published events, and the sensor itself."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import dagster as dg

from benchmarks.past import publish
from benchmarks.servers import fill, fresh_outbox
from benchmarks.table import Figure, Ratio, Row, milliseconds
from outbox_pipelines.defs.health import check_health, health_sensor
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.settings import Settings

_MILLIONS = (1, 10)
_ROUNDS = 30
# Of the sensor: twice a minute; a day's reports of the checks where all is well, and of the numbers.
_TICK_SECONDS = 30.0
_CHECKS_A_DAY = 48
_NUMBERS_A_DAY = 288
# A tick's row in Dagster's storage, of the sensors `health` and `alerts`.
_TICK_BYTES = 800
_TICKS_A_DAY = 2 * 86_400 / _TICK_SECONDS


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as small, fresh_outbox(servers) as large:
        outboxes = dict(zip(_MILLIONS, (small, large), strict=True))
        for millions, settings in outboxes.items():
            fill(settings, millions * 1_000_000)
            publish(settings)
        taken: dict[int, list[float]] = {millions: [] for millions in outboxes}
        for _ in range(_ROUNDS):
            for millions, settings in outboxes.items():
                taken[millions].append(_seconds(settings))
        first = median(taken[_MILLIONS[0]])
        rows = [
            Row(
                f"measurements beside {millions} million published events",
                (milliseconds(median(seconds)),),
                (Ratio(median(seconds) / first, f"{_MILLIONS[0]} million"),),
                "flat",
            )
            for millions, seconds in taken.items()
        ]
        return [*rows, *_sensor(small)]


def _seconds(settings: Settings) -> float:
    """Of a reading, with its connection."""
    started = time.perf_counter()
    outbox_measurements.read(settings)
    return time.perf_counter() - started


def _sensor(settings: Settings) -> list[Row]:
    outbox = Outbox(settings={"dsn": settings.dsn, "schema": settings.db_schema})
    sizes: dict[type, float] = {}
    with tempfile.TemporaryDirectory() as home, dg.DagsterInstance.local_temp(home) as instance:
        _tick(instance, outbox)
        cpu = time.process_time()
        ticks = [_tick(instance, outbox) for _ in range(_ROUNDS)]
        cpu = (time.process_time() - cpu) / _ROUNDS
        for kind in (dg.AssetCheckEvaluation, dg.AssetObservation):
            before = _size(home)
            for event in (event for events in ticks for event in events if isinstance(event, kind)):
                instance.report_runless_asset_event(event)
            sizes[kind] = (_size(home) - before) / _ROUNDS
    day = (
        sizes[dg.AssetCheckEvaluation] * _CHECKS_A_DAY
        + sizes[dg.AssetObservation] * _NUMBERS_A_DAY
        + _TICK_BYTES * _TICKS_A_DAY
    )
    return [
        Row("a sensor tick that reports everything", (milliseconds(cpu, "CPU"),)),
        Row("the sensor, twice a minute", (Figure(cpu / _TICK_SECONDS * 100, "% of a core"),), goal="≤ 2 %"),
        Row("the sensor in Dagster's storage (SQLite)", (Figure(day / 1e6, "MB a day"),), goal="≤ 10 MB"),
    ]


def _tick(instance: dg.DagsterInstance, outbox: Outbox) -> list[dg.AssetObservation]:
    with dg.build_sensor_context(instance=instance) as context:
        result = health_sensor([outbox], [check_health(outbox)])(context)
    assert isinstance(result, dg.SensorResult)
    return list(result.asset_events)  # type: ignore[arg-type]


def _size(home: str) -> int:
    return sum(file.stat().st_size for file in Path(home).rglob("*") if file.is_file())
