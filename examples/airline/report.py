"""What a person sees of the demo: progress while it works, and a summary at the end.

Invariants:
- On a terminal one line renews itself; elsewhere a line comes every few seconds.
- The summary begins with the problems found, and ends with what to try next.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.airline.desks import Desks
from examples.airline.ledger import KINDS, Verdict
from examples.airline.past import Past, told
from examples.airline.place import topics
from examples.airline.projection import Board
from outbox_pipelines.settings import Settings

_TERMINAL_SECONDS: Final = 0.2
_LOG_SECONDS: Final = 3.0


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


class Progress:
    """The line that tells how far the work is."""

    def __init__(self) -> None:
        self._renews = sys.stdout.isatty()
        self._every = _TERMINAL_SECONDS if self._renews else _LOG_SECONDS
        self._next_at = time.monotonic() + self._every

    def due(self) -> bool:
        """Return whether the line before has stood long enough."""
        return time.monotonic() >= self._next_at

    def show(self, line: str) -> None:
        """Shows a line in place of the one before."""
        self._next_at = time.monotonic() + self._every
        if self._renews:
            self._renew(line)
        else:
            say(line)

    def end(self) -> None:
        """Clears the place for other lines."""
        if self._renews:
            self._renew("", end="\r")

    def _renew(self, line: str, end: str = "") -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{line[:width]:<{width}}", end=end, flush=True)


@dataclass(frozen=True, slots=True)
class Relayed:
    """The relay's own numbers."""

    events: int
    sessions: int
    """How many have had the shard, one after the other."""
    latency: tuple[float, float] | None
    """Seconds from commit to acknowledged: the median of all moments, and the worst."""

    @property
    def hand_overs(self) -> int:
        """How often one session has taken over from another."""
        return max(self.sessions - 1, 0)


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long the parts took."""

    writing: float
    draining: float
    verifying: float
    total: float


def progress_line(desks: Desks, relayed: Relayed) -> str:
    """Written, published, rolled back, by now."""
    day = f"{desks.latest:%d %b %Y}" if desks.latest else "planning …"
    return (
        f"  {day:<12} written {desks.events:>9,}   published {relayed.events:>9,}   "
        f"rolled back {desks.called_off.total():>6,}   hand-overs {relayed.hand_overs}"
    )


def summary(
    settings: Settings,
    flights: int,
    desks: Desks,
    relayed: Relayed,
    board: Board,
    verdict: Verdict,
    days: Past,
    seconds: Seconds,
) -> str:
    """The whole story, for a person."""
    wrong = verdict.findings.total()
    heading = (
        f"NOT VERIFIED: {_count(wrong, 'finding')}."
        if wrong
        else "Verified: nothing missing, nothing rolled back, each aircraft's events in order, handled once."
    )
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(desks.called_off.items()))
    rows = {
        "flights": f"{flights:,} real ones of 2013",
        "written": f"{desks.events:,} events in {_count(desks.transactions, 'transaction')}, "
        f"{_rate(desks.events, seconds.writing)}",
        "rolled back": f"{_count(desks.called_off.total(), 'transaction')}, on purpose: {reasons or 'none'}",
        "published": f"{relayed.events:,} events by {_count(relayed.sessions, 'Dagster run')}, "
        f"{_count(relayed.hand_overs, 'hand-over')} under load",
        "latency": _latency(relayed.latency),
        "consumed": f"{_count(verdict.messages, 'message')}, {_rate(verdict.messages, seconds.verifying)}",
        "handled": f"{_count(board.events, 'departure')} by a consumer that was killed "
        f"{_count(board.killed, 'time')}",
        "duplicates": f"{verdict.duplicates:,} (delivered again; consumers know them by the header id)",
    }
    rows |= {kind: f"{verdict.findings[kind]:,} ({meaning})" for kind, meaning in KINDS.items()}
    rows |= told(days)
    rows["time"] = f"{seconds.total:.0f} s, {seconds.draining:.1f} s from the last commit to all published"
    return "\n".join(
        [
            "",
            heading,
            *(f"  {example}" for example in verdict.examples),
            "",
            *_table(rows),
            "",
            "Available until the next run:",
            *_table(
                {
                    f"schema {settings.db_schema}": "flights, aircraft; outbox, outbox_events; "
                    "board_aircraft, board_carriers",
                    "topics": ", ".join(topics(settings)),
                    "archive": str(days.place),
                    **(
                        {}
                        if os.environ.get("OUTBOX_DSN")
                        else {"servers": "for another minute; their data stays"}
                    ),
                }
            ),
            "",
            "Try next:",
            *_table(_next(settings, days)),
        ]
    )


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {value}" for name, value in rows.items()]


def _rate(events: int, seconds: float) -> str:
    return f"{events / max(seconds, 0.001):,.0f} a second"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _latency(latency: tuple[float, float] | None) -> str:
    if latency is None:
        return "unknown"
    median, worst = latency
    return f"median {median * 1000:,.0f} ms from commit to Kafka, worst {worst:.1f} s"


def _next(settings: Settings, days: Past) -> dict[str, str]:
    programs = Path(sys.executable).parent
    outbox = os.path.relpath(programs / "outbox") if (programs / "outbox").exists() else "outbox"
    local = "" if os.environ.get("OUTBOX_DSN") else f"{outbox} local run -- "
    return {
        "see the relay live in Dagster": "make ui",
        "replay a dropped day, forget a passenger": "make demo-archive",
        "the whole year, a million events": "make demo FLIGHTS=all",
        "show the status of this outbox": f"OUTBOX_SCHEMA={settings.db_schema} {local}{outbox} status",
        "query its archive": f"OUTBOX_ARCHIVE={days.place} {outbox} archive query "
        "'SELECT event_date, count(*) FROM events GROUP BY 1 ORDER BY 1'",
        "test each guarantee": "make test",
        "read how an application writes events": "examples/airline/airline.py, then README.md",
        "read how a consumer works": "examples/airline/board.py, then docs/consuming.md",
    }
