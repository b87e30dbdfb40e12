"""What is expected of a day's rows: a suite of Great Expectations over the one row that `days` has counted.

Invariants:
- What would break order or days is an ERROR; what a consumer may stumble over is a WARN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from outbox_pipelines.quality.days import DayFacts
from outbox_pipelines.quality.expectations import Expected, validate
from outbox_pipelines.quality.rules import State

_NONE_OF: Final = {
    "outside": (State.ERROR, "events have a time of another day"),
    "seqs_twice": (State.ERROR, "numbers (seq) are of more than one event"),
    "keys_twice": (State.WARN, "idempotency keys are of more than one event"),
    "nameless": (State.WARN, "events have an empty type, aggregate or key"),
    "not_objects": (State.WARN, "payloads are no JSON object"),
    "lacking": (State.WARN, "payloads lack a member that their schema requires"),
    "unknown_types": (State.WARN, "event types are not in the catalogue"),
}

EXPECTED: Final = [Expected(name, state, below=1) for name, (state, _) in _NONE_OF.items()]

NUMBERS: Final = ("events", "types", *_NONE_OF)
"""Of a day's facts, those to be plotted."""


def judge(facts: DayFacts) -> dict[str, State]:
    """A verdict for each thing that is expected. Imports Great Expectations, which takes seconds."""
    found = asdict(facts)
    return validate("outbox_day", {name: found[name] for name in NUMBERS}, EXPECTED)


def summary(facts: DayFacts, verdicts: Mapping[str, State]) -> str:
    """What is not as expected, in a sentence; or that all is."""
    found = asdict(facts)
    wrong = [f"{found[name]:,} {_NONE_OF[name][1]}" for name, state in verdicts.items() if state]
    return "; ".join(wrong) or f"{facts.events:,} events, all as expected"
