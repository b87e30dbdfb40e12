"""What a run leaves behind, in memory and as a file of JSON lines: all that the judge needs, no more.

Invariants:
- A file that was saved loads as the same history.
- Times are seconds since the epoch, by this machine's clock: messages', faults' and exits' alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

Delivery = Literal["at_least_once", "exactly_once"]
HANDLES_REPLAYS: Final = "replays"
"""The consumer that handles replayed events too."""


class Committed(NamedTuple):
    """An event that was committed: the n-th of an account."""

    kind: str
    account: str
    n: int
    token: str
    at: float | None = None
    """When its transaction committed; None if the server does not keep that."""


class Message(NamedTuple):
    """What a `read_committed` consumer saw, in the order of its partition."""

    kind: str
    partition: int
    offset: int
    key: str
    n: int
    token: str
    id: str
    at: float


class Replayed(NamedTuple):
    """The same of a message that a replay has sent."""

    replay: str
    kind: str
    partition: int
    offset: int
    key: str
    n: int
    token: str
    id: str


class Replay(NamedTuple):
    """A replay that is done."""

    id: str
    due: list[str]
    """The tokens of the events that it had to send."""
    resumed: bool
    """Whether it ended too early and was resumed."""


class ReplayEffect(NamedTuple):
    """What a consumer's handler did about a replayed event."""

    replay: str
    token: str


class Effect(NamedTuple):
    """What a consumer's handler did about an event, in the order in which effects came to be."""

    kind: str
    account: str
    n: int
    token: str


class Unhandled(NamedTuple):
    """An event that a consumer had in its inbox at the end: it waits there, or is a dead letter."""

    token: str
    state: str
    attempts: int
    error: str


class Fault(NamedTuple):
    """What was done to the system, from when to when."""

    name: str
    at: float
    until: float
    disturbs: bool
    """Whether it excuses duplicates and exits: a killed relay does, a killed writer does not."""


class Exit(NamedTuple):
    """A process that ended without being stopped."""

    name: str
    at: float
    code: int
    words: str


@dataclass
class History:
    """One run."""

    relay: str
    seed: int
    delivery: Delivery
    committed: list[Committed] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    """What did not go on in time after a fault was over."""
    different: list[str] = field(default_factory=list)
    """What a relay or consumer does otherwise if it gets the recorded answers again."""
    consumer: str = ""
    """The consumer whose effects they are; empty without a consumer."""
    effects: list[Effect] = field(default_factory=list)
    unhandled: list[Unhandled] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)
    replay_effects: list[ReplayEffect] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    """What was written, and what became of it on the way."""
    steps: dict[str, int] = field(default_factory=dict)
    """Crashes and lost answers, by time and durable step."""


def save(history: History, path: Path) -> None:
    """One line a fact, its kind first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        head = {name: getattr(history, name) for name in _HEAD}
        print(json.dumps(["run", head]), file=file)
        for name in (
            "faults",
            "exits",
            "stuck",
            "different",
            "committed",
            "messages",
            "effects",
            "unhandled",
            "replays",
            "replayed",
            "replay_effects",
        ):
            for fact in getattr(history, name):
                print(json.dumps([name, fact]), file=file)


def load(path: Path) -> History:
    """What `save` wrote."""
    with path.open() as file:
        history = History(**json.loads(next(file))[1])
        for line in file:
            name, fact = json.loads(line)
            getattr(history, name).append(_KINDS[name](*fact) if name in _KINDS else fact)
    return history


_HEAD = ("relay", "seed", "delivery", "consumer", "figures", "steps")
_KINDS: dict[str, type[tuple[Any, ...]]] = {
    "committed": Committed,
    "messages": Message,
    "effects": Effect,
    "unhandled": Unhandled,
    "faults": Fault,
    "exits": Exit,
    "replays": Replay,
    "replayed": Replayed,
    "replay_effects": ReplayEffect,
}
