"""Where other pages quote the results: a text with `{}` for each figure, and which figures these are."""

from __future__ import annotations

from typing import Final, NamedTuple


class Quote(NamedTuple):
    """A place, once in its page."""

    page: str
    text: str
    figures: tuple[tuple[str, str, str], ...]
    """Of each figure its part, its row, and its name or unit; of a ratio what it is a ratio to.

    The row `VERSIONS` has the versions of the part's run.
    """


VERSIONS: Final = "versions"
_RELAY: Final = ("peers", "relay, at_least_once")
_DEBEZIUM: Final = ("peers", "Debezium, tuned, JVM warm")
_TEXTBOOK: Final = ("peers", "textbook publisher")
_STORED: Final = ("storage", "200 bytes: the outbox")
_RATE: Final = "events/s"
_CPU: Final = "CPU-s per 100,000"
_LOOP: Final = "a loop that records nothing"
_ONE: Final = ("consumers", "consumer, one at a time: each event once")
_SHARED: Final = ("consumers", "consumer, up to 100 share a transaction: each event once")
_MANY: Final = ("consumers", "consumer, 100 at a time: each event once")


def _latencies(part: str, name: str, figure: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((part, f"latency at {rate}/s: {name}", figure) for rate in ("100", "1,000"))


QUOTES: Final = (
    Quote("README.md", "| Outbox Pipelines | Debezium {}, tuned |", (("peers", VERSIONS, "Debezium"),)),
    Quote(
        "README.md",
        "| drain of 400,000 events | **{} events/s**; `exactly_once` {} | {} events/s |",
        ((*_RELAY, _RATE), ("peers", "relay, exactly_once", _RATE), (*_DEBEZIUM, _RATE)),
    ),
    Quote("README.md", "A textbook publisher drains {} events/s.", ((*_TEXTBOOK, _RATE),)),
    Quote("README.md", "| CPU for 100,000 events | {} s | {} s |", ((*_RELAY, _CPU), (*_DEBEZIUM, _CPU))),
    Quote("README.md", "| memory | {} MB | {} MB |", ((*_RELAY, "peak"), (*_DEBEZIUM, "peak"))),
    Quote(
        "README.md",
        "| insert → consumer at 100 events/s, p50 and p99 | {} ms, {} ms | {} ms, {} ms |",
        tuple(
            ("latency", f"latency at 100/s: {name}", figure)
            for name in ("relay", "Debezium tuned for latency")
            for figure in ("p50", "p99")
        ),
    ),
    Quote(
        "README.md",
        "{} × as fast as a loop that records nothing,\n{} × if they share transactions",
        ((*_ONE, _LOOP), (*_SHARED, _LOOP)),
    ),
    Quote(
        "docs/architecture.md",
        "[{} events/s instead of\n{}](benchmarks.md#drain-a-backlog)",
        (("peers", "relay on a textbook table", _RATE), (*_RELAY, _RATE)),
    ),
    Quote(
        "docs/scale.md",
        "- an idle relay of its own: {} % of a core",
        (("latency", "idle: relay", "% of a core"),),
    ),
    Quote("docs/scale.md", "publishes up to {} events/s on two cores", ((*_RELAY, _RATE),)),
    Quote(
        "docs/scale.md",
        "handles {} single events, {} in shared transactions or {} in batches",
        ((*_ONE, _RATE), (*_SHARED, _RATE), (*_MANY, _RATE)),
    ),
    Quote(
        "docs/scale.md",
        "| {} MB of table, of which indexes 115, kept 30 days; {} MB of WAL; "
        "with idempotency keys 113 more and up to {} |",
        ((*_STORED, "disk"), (*_STORED, "WAL"), ("storage", "200 bytes: the outbox, with keys", "WAL")),
    ),
    Quote(
        "docs/polling-or-cdc.md",
        "| p50 {} and {} ms, p99 {} and {} ms | p50 {} and {} ms, p99 {} and {} ms |",
        tuple(
            each
            for name in ("relay", "relay from a slot")
            for figure in ("p50", "p99")
            for each in _latencies("cdc", name, figure)
        ),
    ),
    Quote(
        "docs/polling-or-cdc.md",
        "| A backlog of 400,000 events | {} events/s | {} events/s:",
        (
            ("cdc", "drain of 400,000: between snapshots", _RATE),
            ("cdc", "drain of 400,000: from a slot", _RATE),
        ),
    ),
    Quote(
        "docs/polling-or-cdc.md",
        "| Idle relay | {} % of a core: a statement every 25 ms, which reads no table | {} % of a core |",
        (("latency", "idle: relay", "% of a core"), ("cdc", "idle: relay from a slot", "% of a core")),
    ),
    Quote(
        "docs/erasure.md",
        "protecting two members took {} µs, decrypting\nthem {} µs.",
        (
            ("erasure", "emit of an order with two protected members, no commit", "of which protecting"),
            ("erasure", "two members decrypted", "µs"),
        ),
    ),
)
