"""The scopes of the relay: small ones for `make test-system`, large and random ones for `make model`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from outbox_pipelines.relay.core.barrier import Step
from outbox_pipelines.relay.core.transactions import TRANSITIONS
from tests.model.relay.world import COMMIT, Relays
from tests.model.scope import Scope

_DIES: Final = ("dies before", "dies after")
_STEPS: Final = ("insert", "commit", "start", "read", "publish", "broker", "settle")
_PHASES: Final = tuple(f"{phase.value}: {why}" for phase, why in TRANSITIONS)


def _calls(*names: str, what: Sequence[str] = (*_DIES, "fails", "answer lost")) -> tuple[str, ...]:
    return tuple(f"{name}: {each}" for name in names for each in what)


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
        partial(Relays, tuple(writers), **world),
        about,
        must=() if seeds else (*_STEPS, *must),
        is_small=is_small,
        states=states,
        seeds=seeds,
        steps=150,
    )


_FLOW: Final = _calls("settle") + _calls("send", what=_DIES)
_COMMITS: Final = _calls("begin", "commit", what=_DIES) + _calls("commit", what=COMMIT)
_BARRIER: Final = ("want shards", "meet again", "begin anew", *(f"barrier: {step.value}" for step in Step))
_REFUSAL: Final = ("probe", "later", "heads", "record", "mark as tried")
_LARGE: Final[dict[str, Any]] = {
    "slots": 2,
    "late": 1,
    "refuses": [1],
    "mends": 1,
    "faults": 2,
    "switches": 1,
    "stops": 1,
}
_RANDOM: Final[dict[str, Any]] = {
    "slots": 2,
    "late": 2,
    "refuses": [1, 4],
    "unreadable": [2],
    "mends": 1,
    "faults": 3,
    "switches": 3,
    "rollbacks": 1,
    "stops": 1,
    "commands": 2,
}

SCOPES: Final[dict[str, Scope]] = {
    "relay": _scope(
        "two transactions, one fault at any call, a switch of threads at any call",
        ["ab", "a"],
        _FLOW,
        faults=1,
        switches=1,
        states=14_000,
    ),
    "relay-refused": _scope(
        "one event is refused, and later is not; one fault",
        ["ab", "a"],
        (*_FLOW, *_REFUSAL, *_calls("heads", "record", "mark as tried")),
        refuses=[1],
        mends=1,
        faults=1,
        switches=0,
        states=14_000,
    ),
    "relay-pair": _scope(
        "two relays, one hands over, one fault",
        ["a", "a"],
        ("stop", "lose session", *_FLOW),
        slots=2,
        stops=1,
        faults=1,
        switches=0,
        states=8_000,
    ),
    "relay-late": _scope(
        "three transactions that commit in any order, or roll back",
        ["a", "b", "a"],
        ("rollback",),
        faults=0,
        switches=0,
        rollbacks=1,
        states=8_000,
    ),
    "relay-shards": _scope(
        "the number of shards changes, or does not; one fault",
        ["a", "a"],
        _BARRIER,
        changes=1,
        faults=1,
        switches=0,
        states=14_000,
    ),
    "relay-parked": _scope(
        "three parked events, one refused; an operator replays or discards; a fault, a switch",
        ["aab", "a"],
        ("replay", "discard", *_calls("behind", "remove released", "record")),
        parked=["retrying", "waiting", "retrying"],
        refuses=[1],
        mends=1,
        commands=1,
        faults=1,
        switches=1,
        states=8_000,
    ),
    "relay-stop": _scope(
        "three parked events; the relay is stopped at any moment, its successor continues; a switch",
        ["aab", "a"],
        ("stop", "behind: another thread before"),
        parked=["retrying", "waiting", "retrying"],
        slots=2,
        stops=1,
        faults=0,
        switches=1,
        states=4_000,
    ),
    "once": _scope(
        "exactly once: two transactions, one fault at any call, a switch of threads at any call",
        ["ab", "a"],
        (*_FLOW, *_COMMITS),
        exactly_once=True,
        faults=1,
        switches=1,
        states=14_000,
    ),
    "once-refused": _scope(
        "exactly once: one event is refused, and later is not; one fault",
        ["ab", "a"],
        (*_FLOW, *_COMMITS, *_REFUSAL, *_PHASES, *_calls("park")),
        exactly_once=True,
        refuses=[1],
        mends=1,
        faults=1,
        switches=0,
        states=14_000,
    ),
    "once-parts": _scope(
        "exactly once: a tick in two batches, the first of which is refused; a fault, a switch of threads",
        ["ab"],
        (*_FLOW, *_COMMITS),
        exactly_once=True,
        batch_events=1,
        refuses=[1],
        mends=1,
        faults=1,
        switches=1,
        states=8_000,
    ),
    "once-late": _scope(
        "exactly once: a request to end a transaction was asked twice, and arrives late; a fault",
        ["ab", "a"],
        ("late", "overtaken", "fence", "commit: asked twice"),
        exactly_once=True,
        late=1,
        faults=1,
        switches=0,
        states=14_000,
    ),
    "once-unnoticed": _scope(
        "exactly once: the same, and Kafka's client does not notice it: nothing is lost",
        ["ab", "a"],
        ("late", "overtaken", "commit: asked twice", "commit: a late request first"),
        exactly_once=True,
        late=1,
        notices=False,
        faults=1,
        switches=0,
        states=14_000,
    ),
    "once-pair": _scope(
        "exactly once: two relays, one hands over, one fault",
        ["a", "a"],
        ("stop", "lose session", *_COMMITS),
        exactly_once=True,
        slots=2,
        stops=1,
        faults=1,
        switches=0,
        states=8_000,
    ),
    "once-shards": _scope(
        "exactly once: the number of shards changes, or does not; one fault",
        ["a", "a"],
        _BARRIER,
        exactly_once=True,
        changes=1,
        faults=1,
        switches=0,
        states=14_000,
    ),
    "once-parked": _scope(
        "exactly once: three parked events, one refused; an operator replays or discards; a fault, a switch",
        ["aab", "a"],
        ("replay", "discard", *_calls("behind", "remove released", "record")),
        exactly_once=True,
        parked=["retrying", "waiting", "retrying"],
        refuses=[1],
        mends=1,
        commands=1,
        faults=1,
        switches=1,
        states=8_000,
    ),
    "relay-large": _scope(
        "two relays, two batches, one refused event, two faults, a switch",
        ["ab", "ab"],
        is_small=False,
        **_LARGE,
    ),
    "once-large": _scope(
        "exactly once: two relays, two batches, one refused event, two faults, a switch",
        ["ab", "ab"],
        is_small=False,
        exactly_once=True,
        **_LARGE,
    ),
    "relay-random": _scope(
        "random: seven events, two refused, one unreadable, two relays, three faults, an operator",
        ["ab", "a", "b", "abc"],
        seeds=5_000,
        is_small=False,
        **_RANDOM,
    ),
    "once-random": _scope(
        "exactly once, random: as before, each event a batch",
        ["ab", "a", "b", "abc"],
        batch_events=1,
        seeds=5_000,
        is_small=False,
        exactly_once=True,
        **_RANDOM,
    ),
}
