"""The judge: compares what was committed with what the topics contain, and with what a consumer did.

Invariants:
- Looks at the history alone: the same file gets the same verdict.
- First deliveries count for the order; a message seen before is a duplicate, and never out of order.
- Nothing excuses an effect that is missing, comes twice or too early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.history.record import HANDLES_REPLAYS, Fault, History, Message, Replayed, ReplayEffect

# What a fault has caused may show this long after it is over: a lease runs out, a buffer empties.
_AFTERMATH_SECONDS = 10.0


@dataclass
class Verdict:
    """What is wrong with a history; `wrong` is empty when every guarantee held."""

    committed: int
    messages: int
    redelivered: int = 0
    """Messages whose event came before, excused or not."""
    exits: int = 0
    """Of programs that ended without being stopped; excused or not."""
    lost_write: list[str] = field(default_factory=list)
    """Committed, and in no topic."""
    aborted_read: list[str] = field(default_factory=list)
    """In a topic, and in no transaction that committed."""
    dirty_read: list[str] = field(default_factory=list)
    """In a topic before its transaction committed."""
    phantom: list[str] = field(default_factory=list)
    """Committed otherwise: with another key, topic or number; or one event under two ids."""
    out_of_order: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)
    """Redelivered, and nothing excuses that."""
    lost_effect: list[str] = field(default_factory=list)
    phantom_effect: list[str] = field(default_factory=list)
    duplicate_effect: list[str] = field(default_factory=list)
    effect_out_of_order: list[str] = field(default_factory=list)
    lost_replay: list[str] = field(default_factory=list)
    """Published when a replay began, and not sent by it."""
    phantom_replay: list[str] = field(default_factory=list)
    """Sent by a replay, and never published like that."""
    duplicate_replay: list[str] = field(default_factory=list)
    replay_out_of_order: list[str] = field(default_factory=list)
    lost_effect_of_replay: list[str] = field(default_factory=list)
    duplicate_effect_of_replay: list[str] = field(default_factory=list)
    exited: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """Relays and consumers that do not repeat what they did."""
    porcupine: list[str] = field(default_factory=list)
    """What the second judge found."""

    @property
    def wrong(self) -> list[str]:
        """A line for each kind of anomaly, with the first events that have it."""
        found = {kind: some for kind, some in vars(self).items() if isinstance(some, list) and some}
        return [
            f"{kind.replace('_', ' ')} ({len(some)}): {', '.join(some[:5])}" for kind, some in found.items()
        ]

    def __str__(self) -> str:
        counted = f"{self.committed} committed, {self.messages} messages, {self.redelivered} redelivered"
        counted += f", {self.exits} exits"
        return "\n".join([counted, *self.wrong])


def judge(history: History) -> Verdict:
    """Compares (G1, G2, G5; effects once); also counts processes that ended or stood still for no reason."""
    verdict = Verdict(len(history.committed), len(history.messages))
    verdict.stuck, verdict.different = list(history.stuck), list(history.different)
    events = {event.token: event for event in history.committed}
    seen: dict[str, Message] = {}
    newest: dict[tuple[str, str], Message] = {}
    # Partitions one after the other: the order that consumers see is each partition's own.
    for message in sorted(history.messages, key=lambda m: (m.kind, m.partition, m.offset)):
        event = events.get(message.token)
        name = f"{message.kind}/{message.key}/{message.n}"
        if event is None:
            verdict.aborted_read.append(name)
        elif event[:4] != (message.kind, message.key, message.n, message.token):
            verdict.phantom.append(name)
        elif (first := seen.setdefault(message.token, message)) is not message:
            verdict.redelivered += 1
            if first.id != message.id:
                # Under another id no consumer could tell that it is one.
                verdict.phantom.append(f"{name} as {first.id} and as {message.id}")
            elif history.delivery == "exactly_once" or not _excused(
                history.faults, *sorted((first.at, message.at))
            ):
                verdict.duplicate.append(name)
        else:
            # The broker's clock has milliseconds.
            if event.at is not None and message.at + 0.001 <= event.at:
                verdict.dirty_read.append(f"{name} {event.at - message.at:.3f} s before its commit")
            before = newest.setdefault((message.kind, message.key), message)
            if before.partition != message.partition:
                verdict.out_of_order.append(f"{name} in another partition than {before.n}")
            elif before.n > message.n:
                verdict.out_of_order.append(f"{name} after {before.n}")
            else:
                newest[message.kind, message.key] = message
    verdict.lost_write = [f"{e.kind}/{e.account}/{e.n}" for e in history.committed if e.token not in seen]
    if history.consumer:
        _judge_effects(history, verdict)
    _judge_replays(history, verdict)
    verdict.exits = len(history.exits)
    verdict.exited = [
        f"{exit.name} with {exit.code}: {exit.words}"
        for exit in history.exits
        if not _excused(history.faults, exit.at, exit.at)
    ]
    return verdict


def _judge_replays(history: History, verdict: Verdict) -> None:
    originals = {message.token: message for message in history.messages}
    made = Counter(history.replay_effects)
    sent: dict[str, list[Replayed]] = {replay.id: [] for replay in history.replays}
    for message in sorted(history.replayed, key=lambda m: (m.kind, m.partition, m.offset)):
        sent.setdefault(message.replay, []).append(message)
    known = {replay.id: replay for replay in history.replays}
    for replay_id, messages in sent.items():
        replay = known.get(replay_id)
        seen: set[str] = set()
        newest: dict[tuple[str, str], int] = {}
        for message in messages:
            name = f"{message.kind}/{message.key}/{message.n}"
            original = originals.get(message.token)
            like = original and (original.kind, original.partition, *original[3:7])
            if replay is None or like != (message.kind, message.partition, *message[4:]):
                verdict.phantom_replay.append(name)
            elif message.token in seen:
                if history.delivery == "exactly_once" or not replay.resumed:
                    verdict.duplicate_replay.append(name)
            elif message.n < newest.get((message.kind, message.key), 0):
                verdict.replay_out_of_order.append(name)
            else:
                newest[message.kind, message.key] = message.n
            seen.add(message.token)
            if history.consumer == HANDLES_REPLAYS and not made[ReplayEffect(replay_id, message.token)]:
                verdict.lost_effect_of_replay.append(name)
        verdict.lost_replay += [token for token in (replay.due if replay else ()) if token not in seen]
    verdict.duplicate_effect_of_replay = [effect.token for effect, times in made.items() if times > 1]


def _judge_effects(history: History, verdict: Verdict) -> None:
    events = {event[:4] for event in history.committed}
    seen: set[str] = set()
    newest: dict[tuple[str, str], int] = {}
    for effect in history.effects:
        name = f"{effect.kind}/{effect.account}/{effect.n}"
        before = newest.get((effect.kind, effect.account), 0)
        if effect not in events:
            verdict.phantom_effect.append(name)
        elif effect.token in seen:
            verdict.duplicate_effect.append(name)
        elif effect.n < before:
            verdict.effect_out_of_order.append(f"{name} after {before}")
        else:
            newest[effect.kind, effect.account] = effect.n
        seen.add(effect.token)
    # Every event can be handled: that one is a dead letter is no excuse.
    became = {each.token: each for each in history.unhandled}
    for event in history.committed:
        if event.token not in seen:
            name = f"{event.kind}/{event.account}/{event.n}"
            if (it := became.get(event.token)) is not None:
                state = "a dead letter" if it.state == "failed" else it.state
                name += f", {state} after {it.attempts} attempts: {it.error}"
            verdict.lost_effect.append(name)


def _excused(faults: list[Fault], start: float, end: float) -> bool:
    return any(
        fault.disturbs and fault.at <= end and start <= fault.until + _AFTERMATH_SECONDS for fault in faults
    )
