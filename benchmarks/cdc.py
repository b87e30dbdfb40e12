"""Events from a slot, beside those between snapshots and Debezium at its best: drain, latency, idle."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import psycopg

from benchmarks import limits, programs
from benchmarks.latency import DEBEZIUM, RATES, Latency, at_rate, idle, idle_rows, rows, running, warm
from benchmarks.peers import TUNED, Measured, asleep
from benchmarks.quick import QUICK, sized
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Ratio, Row, memory, paired, rate
from outbox_pipelines.relay.read.slot.slot_setup import remove, set_up
from outbox_pipelines.settings import Settings

_EVENTS: Final = sized(400_000, 40_000)
_ROUNDS: Final = sized(3, 1)
_MODES: Final = ("at_least_once", "exactly_once")
_RAW: Final = "bench_raw"
_COPY: Final = """
SELECT pg_copy_logical_replication_slot(slot_name, %s) FROM pg_replication_slots
WHERE database = current_database()"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    return [*_drains(servers), *_latencies(servers)]


def _drains(servers: Settings) -> list[Row]:
    found = {name: Measured() for name in ("snapshots", "Debezium", "pg_recvlogical", *_MODES)}
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
                if delivery == "at_least_once":
                    _copy_slot(slot)
                fill(slot, _EVENTS)
                if delivery == "at_least_once":
                    found["pg_recvlogical"].rates.append(_EVENTS / limits.decode(slot, _RAW))
                    _drop_copy(slot)
                _drain(slot.model_copy(update={"delivery": delivery}), found[delivery])
                # Its log would be read with that of the others.
                remove(slot, seconds=60, say=lambda line: None)
            theirs.drain(found["Debezium"])

    ours, snapshots, exactly, debezium, raw = (
        found[name].rates
        for name in ("at_least_once", "snapshots", "exactly_once", "Debezium", "pg_recvlogical")
    )
    drained = f"drain of {_EVENTS:,}"
    return [
        Row(f"{drained}: between snapshots", (rate(snapshots),)),
        Row(
            f"{drained}: from a slot",
            (rate(ours), memory(found["at_least_once"].memory)),
            (
                Ratio(paired(ours, snapshots), "snapshots"),
                Ratio(paired(ours, debezium), "Debezium"),
                Ratio(paired(ours, raw), "pg_recvlogical"),
                Ratio(paired(found["at_least_once"].cpu, found["Debezium"].cpu), "Debezium", "CPU"),
            ),
            "≥ 0.5 ×, ≥ 1.5 ×, ≥ 0.9 ×; < 150 MB",
        ),
        Row(
            f"{drained}: from a slot, exactly_once",
            (rate(exactly),),
            (
                Ratio(paired(exactly, ours), "at_least_once"),
                Ratio(paired(exactly, debezium), "Debezium"),
                Ratio(paired(exactly, raw), "pg_recvlogical"),
            ),
            "≥ 0.85 ×",
        ),
        Row(f"{drained}: Debezium, tuned, JVM warm", (rate(debezium),)),
        Row(f"{drained}: limit, pg_recvlogical to nothing", (rate(raw),)),
    ]


def _copy_slot(settings: Settings) -> None:
    """Make a slot that starts where the relay's does, so that both decode the same log."""
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(_COPY, [_RAW])


def _drop_copy(settings: Settings) -> None:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [_RAW])


def _drain(settings: Settings, measured: Measured) -> None:
    drain = programs.drain(settings)
    assert drain.events == _EVENTS, drain
    measured.add(drain.events, drain.seconds, drain.cpu, 0.0, drain.peak)


def _latencies(servers: Settings) -> list[Row]:
    found: list[Latency] = []
    resting: dict[str, float] = {}
    # `latency` measures polling, too.
    names = ("relay", "relay from a slot", "relay from a slot, exactly_once", DEBEZIUM)
    for name in ("relay from a slot", DEBEZIUM) if QUICK else names:
        with fresh_outbox(servers) as settings:
            if "slot" in name:
                set_up(settings, seconds=60, say=lambda line: None)
            with running(settings, name) as pid:
                warm(settings)
                found += [at_rate(settings, name, rate, clients) for rate, clients in RATES]
                if name in ("relay from a slot", DEBEZIUM):
                    resting[name] = idle(pid)
            if "slot" in name:
                remove(settings, seconds=60, say=lambda line: None)
    return [*rows(found), *idle_rows(resting)]
