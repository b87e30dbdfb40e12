"""How fast a full table is published, and whether that stays so: beside the reference and the textbook."""

from __future__ import annotations

from statistics import median

import psycopg

from benchmarks import programs
from benchmarks.limits import Limit
from benchmarks.quick import sized
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Ratio, Row, memory, paired, rate
from outbox_pipelines.settings import Settings

_EVENTS = sized(400_000, 40_000)
_LONG = sized(2_000_000, 200_000)
_TEXTBOOK_EVENTS = sized(20_000, 2_000)
_ROUNDS = sized(5, 2)
_FEW_ROUNDS = sized(3, 2)
_LIMITS = {"produce": "limit, librdkafka alone", "copy": "limit, COPY in binary to nothing"}


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as settings:
        topic = settings.topic.format(aggregate_type="order")
        fill(settings, _EVENTS)
        rates: dict[str, list[float]] = {
            name: [] for name in ("bones", "relay", "open", "bones beside writers", "writers", *_LIMITS)
        }
        peaks: list[float] = []
        # In turn, so that a drift of the machine falls on all alike.
        for _ in range(_ROUNDS):
            for which in _LIMITS:
                given = (which, settings.dsn, settings.kafka, topic)
                rates[which].append(Limit(*programs.run(settings, "limits", *given)).rate)
            rates["bones"].append(_reference(settings))
            rates["relay"].append(_drain(settings, peaks))
            with psycopg.connect(settings.dsn) as connection:
                connection.execute("SELECT pg_current_xact_id()")
                rates["open"].append(_drain(settings, peaks))
        textbook = [
            events / seconds
            for events, seconds in (
                programs.run(settings, "textbook", settings.dsn, settings.kafka, topic, _TEXTBOOK_EVENTS)
                for _ in range(_FEW_ROUNDS)
            )
        ]
        for _ in range(_FEW_ROUNDS):
            with programs.running(settings, "benchmarks.load", settings.dsn, 4):
                rates["bones beside writers"].append(_reference(settings))
                rates["writers"].append(_drain(settings, []))
    drained = f"drain of {_EVENTS:,}"
    fast = (
        Ratio(paired(rates["relay"], rates["bones"]), "a bare loop"),
        Ratio(median(rates["relay"]) / median(textbook), "the textbook publisher"),
        Ratio(paired(rates["relay"], rates["produce"]), "librdkafka alone"),
        Ratio(paired(rates["relay"], rates["copy"]), "COPY in binary"),
    )
    alone = Ratio(paired(rates["open"], rates["relay"]), "without it")
    beside = Ratio(paired(rates["writers"], rates["bones beside writers"]), "the bare loop there")
    return [
        Row(f"{drained}: bare loop", (rate(rates["bones"]),)),
        Row(f"{drained}: relay", (rate(rates["relay"]), memory(peaks)), fast, "≥ 0.80 ×, < 250 MB"),
        Row(
            f"{drained}: relay beside a transaction that stays open", (rate(rates["open"]),), (alone,), "flat"
        ),
        Row(f"{drained}: relay while 4 clients write", (rate(rates["writers"]),), (beside,), "≥ 0.80 ×"),
        *(Row(f"{drained}: {name}", (rate(rates[which]),)) for which, name in _LIMITS.items()),
        Row("textbook publisher (batch 100, a commit each)", (rate(textbook),)),
        *_long_drain(servers, rate(rates["relay"]).value),
    ]


def _reference(settings: Settings) -> float:
    rewind(settings)
    topic = settings.topic.format(aggregate_type="order")
    events, seconds = programs.run(settings, "bones", settings.dsn, settings.kafka, topic)
    return events / seconds


def _drain(settings: Settings, peaks: list[float]) -> float:
    rewind(settings)
    drain = programs.drain(settings)
    assert drain.events >= _EVENTS, drain
    peaks.append(drain.peak)
    return drain.rate


def _long_drain(servers: Settings, relay: float) -> list[Row]:
    with fresh_outbox(servers) as settings:
        fill(settings, _LONG)
        drain = programs.drain(settings)
        assert drain.events == _LONG, drain
    ratio = Ratio(drain.rate / relay, f"{_EVENTS:,}")
    return [Row(f"drain of {_LONG:,}: relay", (rate(drain.rate), memory([drain.peak])), (ratio,), "flat")]
