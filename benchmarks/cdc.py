"""Events from a slot, beside those between snapshots and Debezium at its best: drain, latency, idle."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import programs
from benchmarks.latency import DEBEZIUM, Latency, at_rate, idle, rows, running, warm
from benchmarks.peers import TUNED, Measured, asleep
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Row
from outbox_pipelines.relay.read.slot.slot_setup import remove, set_up
from outbox_pipelines.settings import Settings

_EVENTS: Final = 400_000
_ROUNDS: Final = 3
_RATES: Final = ((100, 1), (1000, 2))
_MODES: Final = ("at_least_once", "exactly_once")


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    return [*_drains(servers), *_latencies(servers)]


def _drains(servers: Settings) -> list[Row]:
    found = {name: Measured() for name in ("snapshots", "Debezium", *_MODES)}
    with (
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
        asleep(servers, Path(folder) / "tuned", TUNED) as theirs,
        fresh_outbox(servers) as between,
        fresh_outbox(servers) as slot,
    ):
        fill(between, _EVENTS)
        # Warms the JVM.
        theirs.drain(Measured())
        for _ in range(_ROUNDS):
            rewind(between)
            _drain(between, found["snapshots"])
            for delivery in _MODES:
                set_up(slot, seconds=60, say=lambda line: None)
                # Up to the beginning of the slot, it reads between snapshots.
                assert programs.drain(slot).events == 0
                fill(slot, _EVENTS)
                _drain(slot.model_copy(update={"delivery": delivery}), found[delivery])
                # Its log would be read with that of the others.
                remove(slot, seconds=60, say=lambda line: None)
            theirs.drain(found["Debezium"])

    def paired(one: str, other: str) -> float:
        return median(a / b for a, b in zip(found[one].rates, found[other].rates, strict=True))

    ours = (
        f"{paired('at_least_once', 'snapshots'):.2f} × snapshots, "
        f"{paired('at_least_once', 'Debezium'):.1f} × Debezium"
    )
    ratio = f"{paired('exactly_once', 'at_least_once'):.2f} × at_least_once"
    return [
        Row("drain of 400,000: between snapshots", f"{found['snapshots'].rate:,.0f} events/s"),
        Row(
            "drain of 400,000: from a slot",
            f"{found['at_least_once'].rate:,.0f} events/s",
            ours,
            "≥ 0.5 ×, ≥ 1.5 ×",
        ),
        Row("  its peak memory", f"{max(found['at_least_once'].memory):.0f} MB", "", "< 150 MB"),
        Row(
            "drain of 400,000: from a slot, exactly_once",
            f"{found['exactly_once'].rate:,.0f} events/s",
            ratio,
            "≥ 0.85 ×",
        ),
        Row("drain of 400,000: Debezium, tuned, JVM warm", f"{found['Debezium'].rate:,.0f} events/s"),
    ]


def _drain(settings: Settings, measured: Measured) -> None:
    drain = programs.drain(settings)
    assert drain.events == _EVENTS, drain
    measured.add(drain.events, drain.seconds, drain.cpu, 0.0, drain.peak)


def _latencies(servers: Settings) -> list[Row]:
    found: list[Latency] = []
    resting: list[Row] = []
    for name in ("relay", "relay from a slot", "relay from a slot, exactly_once", DEBEZIUM):
        with fresh_outbox(servers) as settings:
            if "slot" in name:
                set_up(settings, seconds=60, say=lambda line: None)
            with running(settings, name) as pid:
                warm(settings)
                found += [at_rate(settings, name, rate, clients) for rate, clients in _RATES]
                if name == "relay from a slot":
                    resting.append(idle(pid))
            if "slot" in name:
                remove(settings, seconds=60, say=lambda line: None)
    return [*rows(found), *resting]
