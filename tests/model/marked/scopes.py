"""The scopes of a marked table's relay: small for `make test-system`, large and random for `make model`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from tests.model.marked.world import Marked
from tests.model.scope import Scope

_STEPS: Final = ("insert", "commit", "start", "claim", "publish", "broker")
_WHAT: Final = ("dies before", "dies after", "fails", "answer lost")


def _calls(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}: {each}" for name in names for each in _WHAT)


def _scope(
    about: str,
    writers: Sequence[str],
    must: Sequence[str] = (),
    *,
    states: int | None = None,
    is_small: bool = True,
    seeds: int = 0,
    **world: Any,
) -> Scope:
    return Scope(
        partial(Marked, tuple(writers), **world),
        about,
        must=() if seeds else (*_STEPS, *must),
        is_small=is_small,
        states=states,
        seeds=seeds,
        steps=150,
    )


_QUIET: Final[dict[str, Any]] = {"faults": 0, "switches": 0}
_ALL: Final[dict[str, Any]] = {
    "slots": 2,
    "refuses": [1],
    "repairs": 1,
    "commands": 1,
    "stops": 1,
    "faults": 2,
    "switches": 1,
}

SCOPES: Final[dict[str, Scope]] = {
    "marked": _scope(
        "two transactions, one fault at any call",
        ["ab", "a"],
        ("stall", "lose session", "unlock", *_calls("claim", "mark")),
        switches=0,
    ),
    "marked-stop": _scope(
        "two relays, the first hands over at any moment; an event is refused; a switch of threads",
        ["aa"],
        ("stop", "probe", "record"),
        refuses=[1],
        repairs=1,
        slots=2,
        stops=1,
        faults=0,
    ),
    "marked-refused": _scope(
        "one event is refused, and later is not; one fault",
        ["ab", "a"],
        ("probe", "repair", "later", *_calls("read", "record", "rehearse")),
        refuses=[1],
        repairs=1,
        switches=0,
        states=3_000,
    ),
    "marked-pair": _scope(
        "two relays, one hands over, one fault",
        ["a", "a"],
        ("stop", "lose session", "kill", "end claims"),
        slots=2,
        stops=1,
        switches=0,
        states=2_000,
    ),
    "marked-shared": _scope(
        "two relays share the table, one fault",
        ["a", "a"],
        ("stall", "lose session", "kill", "end claims"),
        is_shared=True,
        slots=2,
        switches=0,
        batch_events=1,
        states=2_500,
    ),
    "marked-late": _scope(
        "three transactions that commit in any order, or roll back; another session locks a row",
        ["a", "b", "a"],
        ("rollback", "lock", "locked"),
        rollbacks=1,
        locks=1,
        states=2_000,
        **_QUIET,
    ),
    "marked-block": _scope(
        "an aggregate waits for its dead letter, which an operator makes pending again or deletes",
        ["aa", "b"],
        ("pend", "delete", "still failed"),
        refuses=[1],
        repairs=1,
        commands=1,
        blocks=True,
        states=2_500,
        **_QUIET,
    ),
    "marked-unreadable": _scope(
        "a row cannot be read until an operator repairs it",
        ["ab", "a"],
        ("bury", "repair", "pend"),
        unreadable=[1],
        repairs=1,
        commands=1,
        **_QUIET,
    ),
    "marked-unmarkable": _scope(
        "a row cannot be marked until an operator repairs the table",
        ["a", "ab"],
        ("mark the rest", "repair"),
        unmarkable=[2],
        repairs=1,
        batch_events=1,
        **_QUIET,
    ),
    "marked-unmarkable-refused": _scope(
        "a refused row cannot be marked either",
        ["b", "ab"],
        ("rehearse", "repair"),
        unmarkable=[2],
        refuses=[2],
        repairs=2,
        batch_events=1,
        states=1_500,
        **_QUIET,
    ),
    "marked-forgets": _scope(
        "one event is refused, and the table has no column that says so; one fault",
        ["aa"],
        ("probe", "kill"),
        refuses=[1],
        repairs=1,
        remembers=False,
        switches=0,
        states=1_500,
    ),
    "marked-until-empty": _scope(
        "a run until empty; another session locks a row, an event is refused",
        ["aa"],
        ("locked", "probe"),
        until_empty=True,
        refuses=[1],
        repairs=1,
        locks=1,
        states=2_000,
        **_QUIET,
    ),
    "marked-large": _scope(
        "two relays, two batches, one refused event, two faults, a switch, an operator",
        ["ab", "ab"],
        is_small=False,
        **_ALL,
    ),
    "marked-block-large": _scope(
        "the same; aggregates wait for their dead letters",
        ["ab", "ab"],
        is_small=False,
        blocks=True,
        **_ALL,
    ),
    "marked-random": _scope(
        "random: seven events, two refused, one unreadable, two relays, three faults, locks, an operator",
        ["ab", "a", "b", "abc"],
        seeds=5_000,
        is_small=False,
        slots=2,
        refuses=[1, 4],
        unreadable=[3],
        repairs=1,
        commands=2,
        stops=1,
        faults=3,
        switches=3,
        rollbacks=1,
        locks=2,
    ),
}
