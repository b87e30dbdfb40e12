"""How fast a full table is published, and whether that stays so: beside the reference and the textbook."""

from __future__ import annotations

from statistics import median

import psycopg

from benchmarks import programs
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Row
from outbox_pipelines.settings import Settings

_EVENTS = 400_000
_TEXTBOOK_EVENTS = 20_000
_ROUNDS = 5


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as settings:
        topic = settings.topic.format(aggregate_type="order")
        fill(settings, _EVENTS)
        rates: dict[str, list[float]] = {
            name: [] for name in ("bones", "relay", "open", "bones beside writers", "writers")
        }
        memory: list[float] = []
        # In turn, so that a drift of the machine falls on all alike.
        for _ in range(_ROUNDS):
            rates["bones"].append(_reference(settings))
            rates["relay"].append(_drain(settings, memory))
            with psycopg.connect(settings.dsn) as connection:
                connection.execute("SELECT pg_current_xact_id()")
                rates["open"].append(_drain(settings, memory))
        textbook = [
            events / seconds
            for events, seconds in (
                programs.run(settings, "textbook", settings.dsn, settings.kafka, topic, _TEXTBOOK_EVENTS)
                for _ in range(3)
            )
        ]
        for _ in range(3):
            with programs.running(settings, "benchmarks.load", settings.dsn, 4):
                rates["bones beside writers"].append(_reference(settings))
                rates["writers"].append(_drain(settings, []))
    bones = median(rates["bones"])
    relay = median(rates["relay"])
    paired = median(r / b for r, b in zip(rates["relay"], rates["bones"], strict=True))
    return [
        Row("drain of 400,000: bare loop (reference)", f"{bones:,.0f} events/s"),
        Row("drain of 400,000: relay", f"{relay:,.0f} events/s", f"{paired:.2f} × the reference", "≥ 0.80 ×"),
        Row("  its peak memory", f"{max(memory):.0f} MB", "", "< 250 MB"),
        Row(
            "  beside a transaction that stays open",
            f"{median(rates['open']):,.0f} events/s",
            f"{median(rates['open']) / relay:.2f} × alone",
            "flat",
        ),
        Row(
            "  while 4 clients write",
            f"{median(rates['writers']):,.0f} events/s",
            f"{median(rates['writers']) / median(rates['bones beside writers']):.2f} × the reference there",
            "≥ 0.80 ×",
        ),
        Row(
            "textbook publisher (batch 100, a commit each)",
            f"{median(textbook):,.0f} events/s",
            f"relay {relay / median(textbook):.0f} × faster",
        ),
        *_long_drain(servers, relay),
    ]


def _reference(settings: Settings) -> float:
    rewind(settings)
    topic = settings.topic.format(aggregate_type="order")
    events, seconds = programs.run(settings, "bones", settings.dsn, settings.kafka, topic)
    return events / seconds


def _drain(settings: Settings, memory: list[float]) -> float:
    rewind(settings)
    drain = programs.drain(settings)
    assert drain.events >= _EVENTS, drain
    memory.append(drain.peak)
    return drain.rate


def _long_drain(servers: Settings, relay: float) -> list[Row]:
    with fresh_outbox(servers) as settings:
        fill(settings, 2_000_000)
        drain = programs.drain(settings)
        assert drain.events == 2_000_000, drain
    return [
        Row(
            "drain of 2,000,000: relay",
            f"{drain.rate:,.0f} events/s",
            f"{drain.rate / relay:.2f} × 400,000",
            "flat",
        ),
        Row("  its peak memory", f"{drain.peak:.0f} MB", "", "< 250 MB"),
    ]
