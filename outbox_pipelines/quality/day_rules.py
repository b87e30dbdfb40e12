"""The expectations on a day's rows: a suite of Great Expectations over the one row counted by `days`.

Invariants:
- A finding that breaks the order or the days is an ERROR; one that may make a consumer fail is a WARN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from outbox_pipelines.quality.days import DayFacts
from outbox_pipelines.quality.expectations import Expected, validate
from outbox_pipelines.quality.rules import Status

_NONE_OF: Final = {
    "outside": (Status.ERROR, "events have a time of another day"),
    "seqs_twice": (Status.ERROR, "numbers (seq) belong to more than one event"),
    "keys_twice": (Status.WARN, "idempotency keys belong to more than one event"),
    "nameless": (Status.WARN, "events have an empty type, aggregate or key"),
    "not_objects": (Status.WARN, "payloads are not a JSON object"),
    "lacking": (Status.WARN, "payloads lack a member that their schema requires"),
    "unknown_types": (Status.WARN, "event types are not in the event catalog"),
}

EXPECTED: Final = [Expected(name, state, below=1) for name, (state, _) in _NONE_OF.items()]

NUMBERS: Final = ("events", "types", *_NONE_OF)
"""The facts of a day that are plotted."""


def judge(facts: DayFacts) -> dict[str, Status]:
    """Return a result for each expectation. Imports Great Expectations, which takes seconds."""
    found = asdict(facts)
    return validate("outbox_day", {name: found[name] for name in NUMBERS}, EXPECTED)


def summary(facts: DayFacts, results: Mapping[str, Status]) -> str:
    """Return the failed expectations in a sentence, or that all are met."""
    found = asdict(facts)
    wrong = [f"{found[name]:,} {_NONE_OF[name][1]}" for name, status in results.items() if status]
    return "; ".join(wrong) or f"{facts.events:,} events, all as expected"
