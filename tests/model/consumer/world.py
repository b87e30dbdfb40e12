"""Processes of a consumer, their database, Kafka's group, faults and operators.

Invariants, on every state (G10):
- once: an event has its effects once.
- order: the effects of a key come in the order of its events, except those that were dead letters.
- accounted: an event behind a committed offset, or recorded, has its effects or lies in the inbox.
- blame: an event is a dead letter after all its attempts, each of which called the handler or was cut off by
  a fault; one that can be handled is none unless faults cut them all off.
- alive: the code raises nothing, whatever the world answers.
And if faults stop, every event is handled or a dead letter in the end, and its offset is committed.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.model.consumer import process
from tests.model.consumer.database import OPEN, Blocked, Database, Session
from tests.model.consumer.process import AT_ONCE, ENDED, TOP, Program, Request, Setting
from tests.model.explore import Action, Broken, Key

_DEAD: Final = -1
_GUILTY: Final = ("refused", "kills")
_WITHOUT_HANDLER: Final = "ignored"


@dataclass(frozen=True)
class Plan:
    """What is in a scope.

    Args:
        setting: of the consumer.
        log: of each partition the events, in the order of their offsets; one may come again.
        modes: of each process: run, receive or drain.
        faults: how many of each of `Consumers.FAULTS` there may be.
        total: how many altogether.
        is_slow: whether a process may be slower than the backoff between a claim and its attempt. Attempts
            then count that were not made.
    """

    setting: Setting
    log: tuple[tuple[int, ...], ...]
    modes: tuple[str, ...] = ("run",)
    faults: Mapping[str, int] = field(default_factory=dict)
    total: int = 2
    is_slow: bool = False

    def __hash__(self) -> int:
        return hash(
            (self.setting, self.log, self.modes, tuple(sorted(self.faults.items())), self.total, self.is_slow)
        )

    def program(self, mode: str) -> Program:
        """Return the production code of a process."""
        setting = self.setting
        return process.program(setting if mode == "run" else Setting(**{**vars(setting), "mode": mode}))


class Scene:
    """A plan and what is made from it once; pickled as its number."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.number = number
        self.programs = [plan.program(mode) for mode in plan.modes]
        # Processes that do the same can be interchanged.
        self.ways = [
            way
            for way in itertools.permutations(range(len(plan.modes)))
            if all(plan.modes[to] == mode for to, mode in zip(way, plan.modes, strict=True))
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _scene_of, (self.number,)


SCENES: Final[list[Scene]] = []


def _scene_of(number: int) -> Scene:
    return SCENES[number]


def _scene(plan: Plan) -> Scene:
    for each in SCENES:
        if each.plan == plan:
            return each
    SCENES.append(Scene(plan, len(SCENES)))
    return SCENES[-1]


def forget() -> None:
    """Run the production code again: it is another one now."""
    process.PROGRAMS.clear()
    for each in SCENES:
        each.programs = [each.plan.program(mode) for mode in each.plan.modes]


class Process:
    """One place for a process: what runs there now, and what it has of Kafka."""

    def __init__(self, state: int) -> None:
        self.state = state
        self.is_stopping = False
        self.is_member = True
        """Whether the group counts it in; one that was expelled comes back when it has heard of that."""
        self.callbacks: list[tuple[str, int]] = []
        self.places: dict[int, int] = {}
        """Of the partitions that it believes to have: the next offset."""
        self.session = Session()
        self.claimed: int | None = None
        """The row of the inbox that it has an attempt at."""

    def key(self) -> tuple[Any, ...]:
        return (
            self.state,
            self.is_stopping,
            self.is_member,
            tuple(self.callbacks),
            tuple(sorted(self.places.items())),
            self.session.key(),
            self.claimed,
        )


class Zombie:
    """A session whose client is gone, until the server notices."""

    def __init__(self, session: Session, owner: int, pending: Request | None) -> None:
        self.session = session
        self.owner = owner
        self.pending = pending
        """What was sent last: a commit, or a statement with its own."""

    def key(self) -> tuple[Any, ...]:
        return self.owner, self.pending, self.session.key()


class Consumers:
    """The world."""

    FAULTS: Collection[str] = (
        *("crash", "lose", "victim", "expel", "move", "stop", "outage", "replay", "discard"),
    )

    def __init__(self, plan: Plan) -> None:
        self.of = _scene(plan)
        self.faults = dict(plan.faults)
        self.total = plan.total
        self.cut = 0
        """Attempts that faults may have cut off."""
        self.database = Database(plan.setting.keys, blocks=plan.setting.blocks)
        self.processes: list[Process | None] = []
        for each in self.of.programs:
            self.processes.append(Process(each.begin))
        self.zombies: list[Zombie] = []
        # Kafka: offsets, and whom the group counts as owner of each partition.
        self.offsets = [0] * len(plan.log)
        self.group: list[int | None] = [None] * len(plan.log)
        # Where a revoked partition is to go.
        self.moving: dict[int, int] = {}
        self.is_service_up = True
        self.effects: list[int] = []
        # How often the handler was called for an event since it was received or replayed, up to all attempts.
        self.tries = [0] * len(plan.setting.kinds)
        self.excused: set[int] = set()
        self.covered: set[str] = set()
        self._sessions()

    # What can happen.

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for nth, each in enumerate(self.processes):
            if each is None:
                found.append(("start", nth))
            else:
                found.extend(self._steps(nth, each))
        for nth, zombie in enumerate(self.zombies):
            found.append(("reap", nth))
            if zombie.pending is not None and not self._waits(zombie):
                found.append(("late", nth))
        for place, owner in enumerate(self.group):
            if owner is None:
                found.extend(("assign", place, nth) for nth in self._members())
        # Assumed: a process that lives goes on with what it has claimed before the next attempt is due.
        claimed = {
            each.claimed
            for nth, each in enumerate(self.processes)
            if each is not None and self._request(nth)[0] == "FINISH" and not self.of.plan.is_slow
        }
        for seq, (_, state, _, is_due) in self.database.inbox.items():
            if state == "waiting" and not is_due and seq not in claimed:
                found.append(("due", seq))
        if not self.is_service_up:
            found.append(("heal",))
        if self.total:
            found.extend(self._faults())
        return found

    def _waits(self, zombie: Zombie) -> bool:
        assert zombie.pending is not None
        if zombie.pending[0] in ("TAKE_BACK", "HURRY"):
            try:
                # It would wait for a row.
                wanted = zombie.pending[1]
                seqs = wanted if isinstance(wanted, tuple) else (wanted,)
                self.database._updated(zombie.session, seqs)
            except Blocked:
                return True
        return False

    def _steps(self, nth: int, each: Process) -> Iterator[Action]:
        request = self._request(nth)
        if request == TOP:
            yield from self._tops(nth, each)
        elif request[0] in ("stay", "pause"):
            yield ("serve", nth)
            if request[0] == "stay":
                yield ("skip", nth)
        elif not self.database.is_blocked(each.session):
            yield ("step", nth)

    def _tops(self, nth: int, each: Process) -> Iterator[Action]:
        if each.is_stopping:
            yield ("end", nth)
            # It may have come while messages were waited for.
            yield from (("poll", nth, True, here) for here in self._batches(nth, each))
            return
        mode = self.of.plan.modes[nth]
        if mode == "drain":
            yield ("look", nth)
            return
        top = self.of.programs[nth].top(each.state)
        if each.callbacks or top.has_stored or not each.is_member or self.database.inbox or top.breaker:
            # Otherwise nothing comes of it.
            yield ("poll", nth, True, ())
        for here in self._batches(nth, each):
            yield ("poll", nth, True, here)
            if not (top.looks and top.commits) or top.breaker:
                yield ("poll", nth, False, here)

    def _batches(self, nth: int, each: Process) -> Iterator[tuple[int, ...]]:
        """What may be there: of which partitions the next messages are, at most a batch."""
        paused = self.of.programs[nth].top(each.state).paused
        gone = {place for kind, place in each.callbacks if kind != "assign"}
        log = self.of.plan.log
        new = {place: self.offsets[place] for kind, place in each.callbacks if kind == "assign"}
        positions = {**each.places, **new}
        places = [
            place
            for place, at in sorted(positions.items())
            if (place not in gone or place in new) and place not in paused and at < len(log[place])
        ]
        setting = self.of.plan.setting
        most = max(setting.batch, setting.per_transaction, setting.polled)
        for place in places:
            left = len(log[place]) - positions[place]
            yield from ((place,) * count for count in range(1, min(left, most) + 1))
        if most > 1:
            yield from itertools.permutations(places, 2)

    def _faults(self) -> Iterator[Action]:
        left = {name for name, count in self.faults.items() if count}
        for nth, each in enumerate(self.processes):
            if each is None:
                continue
            request = self._request(nth)
            if "crash" in left:
                yield ("crash", nth)
            if "lose" in left and request[0] not in (
                *TOP,
                *ENDED,
                "stay",
                "pause",
                "poll",
                "release",
                "leave",
            ):
                yield ("lose", nth)
            if "victim" in left and request[0] in ("RECORD", "RECORD_MANY", "FINISH", "commit"):
                yield ("victim", nth)
            if "expel" in left and each.is_member and nth in self.group:
                yield ("expel", nth)
            if "stop" in left and not each.is_stopping:
                yield ("stop", nth)
        if "move" in left:
            for place, owner in enumerate(self.group):
                if owner is not None and place not in self.moving:
                    yield from (("move", place, nth) for nth in self._members() if nth != owner)
        if "outage" in left and self.is_service_up:
            yield ("outage",)
        for name in ("replay", "discard"):
            if name in left:
                for seq, (_, state, _, _) in self.database.inbox.items():
                    if state == "failed":
                        yield (name, seq)

    def _members(self) -> list[int]:
        """Processes that the group gives partitions to."""
        return [
            nth
            for nth, each in enumerate(self.processes)
            if each is not None
            and each.is_member
            and not each.is_stopping
            and self.of.plan.modes[nth] != "drain"
        ]

    # What it does.

    def do(self, action: Action) -> None:
        name = action[0]
        if name in self.FAULTS:
            self.faults[name] -= 1
            self.total -= 1
        getattr(self, f"_do_{name}")(*action[1:])
        self._require_blame()

    def _do_start(self, nth: int) -> None:
        each = Process(self.of.programs[nth].begin)
        self.processes[nth] = each
        self._sessions()

    def _do_poll(self, nth: int, is_late: bool, here: tuple[int, ...]) -> None:
        each = self._process(nth)
        each.state = self.of.programs[nth].move(each.state, False, is_late)
        request = self._request(nth)
        if request[0] != "poll":
            raise Broken("alive", f"asked to poll, and did {request}")
        self._commit_offsets(nth, request[1])
        callbacks = self._served(nth)
        log = self.of.plan.log
        messages = []
        for place in here:
            at = each.places[place]
            messages.append((log[place][at], place, at))
            each.places[place] = at + 1
        self._answer(nth, (callbacks, tuple(messages)))

    def _do_look(self, nth: int) -> None:
        self._move(nth, True)
        self._settle(nth)

    def _do_end(self, nth: int) -> None:
        self._move(nth, True)
        self._settle(nth)

    def _do_serve(self, nth: int) -> None:
        self._answer(nth, self._served(nth))

    def _do_skip(self, nth: int) -> None:
        self._answer(nth, ())

    def _do_step(self, nth: int) -> None:
        each = self._process(nth)
        request = self._request(nth)
        name = request[0]
        self.covered.add(name)
        if name == "commit":
            self._commit(each.session, request[1])
            answer: Any = None
        elif name == "rollback":
            each.session.clear()
            answer = None
        elif name == "release":
            self._commit_offsets(nth, request[2])
            self._give(request[1])
            answer = None
        elif name == "leave":
            self._commit_offsets(nth, request[1])
            answer = None
        else:
            try:
                answer = self._statement(each.session, nth, request)
            except Blocked:
                self.covered.add("blocked")
                return
            if name == "CLAIM" and answer is not None:
                each.claimed = request[1]
            elif name in ("CLAIM", "MISSED", "NEXT") or (name == "FINISH" and not answer):
                each.claimed = None
        self._answer(nth, answer)

    def _statement(self, session: Session, owner: int, request: Request) -> Any:
        name = request[0]
        if name == "MISSED" and request[4] and self.database.inbox[request[1]][2] > request[2]:
            # Assumed: an attempt that the next one has overtaken counts, whatever became of it.
            self.covered.add("overtaken")
            self.cut += 1
        if name == "HURRY":
            # Known: it makes due what another process has just claimed, so that two attempts count.
            others = (each for nth, each in enumerate(self.processes) if each is not None and nth != owner)
            if any(each.claimed in request[1] for each in others):
                self.covered.add("hurried while claimed")
                self.cut += 1
        answer = self.database.run(session, owner, *request)
        if name == "RECORD" and answer:
            self._try(request[1])
        elif name == "RECORD_MANY":
            for nth in answer:
                self._try(nth)
        elif name == "FINISH" and answer:
            self._try(self.database.inbox[request[1]][0])
        return answer

    def _try(self, nth: int) -> None:
        self.tries[nth] = min(self.tries[nth] + 1, self.of.plan.setting.attempts)

    def _do_lose(self, nth: int) -> None:
        """The connection is lost; the server learns of that later."""
        each = self._process(nth)
        # Where the handler is not called yet, the loss costs no attempt. Where a service may be down,
        # attempts are also taken back, and that may be lost.
        costs = self._request(nth)[0] in ("CLAIM", "commit", "rollback")
        self.cut += costs or "needs" in self.of.plan.setting.kinds
        self._to_zombie(nth, each)
        each.session = Session()
        self._sessions()
        self._answer(nth, None if self._request(nth)[0] == "rollback" else "lost")

    def _do_victim(self, nth: int) -> None:
        self._process(nth).session.clear()
        self._answer(nth, "victim")

    def _do_crash(self, nth: int) -> None:
        self.cut += 1
        self._die_process(nth)

    def _do_stop(self, nth: int) -> None:
        self._process(nth).is_stopping = True

    def _do_expel(self, nth: int) -> None:
        """The group goes on without a process, which does not know it yet."""
        each = self._process(nth)
        each.is_member = False
        lost = sorted({*(place for place, owner in enumerate(self.group) if owner == nth), *each.places})
        for place in range(len(self.group)):
            if self.group[place] == nth:
                self._give(place)
        pending = {place for kind, place in each.callbacks if kind == "assign"}
        each.callbacks = [("lost", place) for place in lost if place in each.places or place not in pending]
        if not each.callbacks:
            each.is_member = True

    def _do_move(self, place: int, to: int) -> None:
        """The group wants a partition to go to another process."""
        owner = self.group[place]
        assert owner is not None
        each = self._process(owner)
        self.moving[place] = to
        if ("assign", place) in each.callbacks:
            each.callbacks.remove(("assign", place))
            self._give(place)
        else:
            each.callbacks.append(("revoke", place))

    def _do_assign(self, place: int, nth: int) -> None:
        self.group[place] = nth
        self._process(nth).callbacks.append(("assign", place))

    def _do_reap(self, nth: int) -> None:
        """The server notices that a client is gone, and rolls back."""
        self.zombies.pop(nth)
        self._sessions()

    def _do_late(self, nth: int) -> None:
        """What a client sent last is done after it has gone."""
        zombie = self.zombies.pop(nth)
        assert zombie.pending is not None
        if zombie.pending[0] == "commit":
            self._commit(zombie.session, zombie.pending[1])
        else:
            self._statement(zombie.session, zombie.owner, zombie.pending)
        self._sessions()

    def _do_due(self, seq: int) -> None:
        self.database.become_due(seq)

    def _do_outage(self) -> None:
        self.is_service_up = False

    def _do_heal(self) -> None:
        self.is_service_up = True

    def _do_replay(self, seq: int) -> None:
        self.database.replay(seq)
        self.tries[self.database.inbox[seq][0]] = 0

    def _do_discard(self, seq: int) -> None:
        self.database.discard(seq)
        self.excused.add(self.database.inbox[seq][0])

    # Its parts.

    def _process(self, nth: int) -> Process:
        each = self.processes[nth]
        assert each is not None
        return each

    def _request(self, nth: int) -> Request:
        return self.of.programs[nth].request(self._process(nth).state)

    def _sessions(self) -> None:
        alive = [each.session for each in self.processes if each is not None]
        self.database.sessions = [*alive, *(each.session for each in self.zombies)]

    def _move(self, nth: int, answer: Any) -> None:
        each = self._process(nth)
        each.state = self.of.programs[nth].move(each.state, each.is_stopping, answer)

    def _answer(self, nth: int, answer: Any) -> None:
        self._move(nth, answer)
        self._settle(nth)

    def _settle(self, nth: int) -> None:
        """Answer what needs no choice."""
        while True:
            each = self._process(nth)
            name, *given = self._request(nth)
            if name in ("stay", "pause") and not each.callbacks:
                self._move(nth, ())
            elif name == "HEADS" and not self.database.inbox:
                # It is looked at again as soon as there is something.
                self._move(nth, ())
            elif name == "service":
                self.covered.add("service up" if self.is_service_up else "service down")
                self._move(nth, self.is_service_up)
            elif name == "top":
                each.claimed = None
                return
            elif name == "kill":
                self.covered.add("kill")
                self._die_process(nth)
                return
            elif name == "crashed":
                raise Broken("alive", given[0])
            elif name == "ended":
                self.covered.add("ended")
                self._leave(nth)
                return
            else:
                return

    def _served(self, nth: int) -> tuple[tuple[str, int], ...]:
        """What the client hears of the group."""
        each = self._process(nth)
        callbacks, each.callbacks = tuple(each.callbacks), []
        each.is_member = True
        for kind, place in callbacks:
            self.covered.add(kind)
            if kind == "assign":
                each.places[place] = self.offsets[place]
            else:
                each.places.pop(place, None)
        return callbacks

    def _commit_offsets(self, nth: int, commits: tuple[tuple[int, int], ...]) -> None:
        for place, offset in commits:
            # One that the group does not count as the owner is refused.
            if self.group[place] == nth and ("assign", place) not in self._process(nth).callbacks:
                self.offsets[place] = offset

    def _give(self, place: int) -> None:
        """A partition has no owner any more, and goes to where it is to go."""
        self.group[place] = None
        to = self.moving.pop(place, None)
        if to is not None and to in self._members():
            self._do_assign(place, to)

    def _leave(self, nth: int) -> None:
        self.processes[nth] = None
        self._sessions()
        for place in range(len(self.group)):
            if self.group[place] == nth:
                self._give(place)
        self.moving = {place: to for place, to in self.moving.items() if to != nth}

    def _die_process(self, nth: int) -> None:
        self._to_zombie(nth, self._process(nth))
        for place, owner in self.database.owners.items():
            if owner == nth:
                self.database.owners[place] = _DEAD
        for zombie in self.zombies:
            if zombie.owner == nth:
                zombie.owner = _DEAD
        self._leave(nth)

    def _to_zombie(self, nth: int, each: Process) -> None:
        request = self._request(nth)
        pending = request if request[0] == "commit" or request[0] in AT_ONCE else None
        session = each.session
        if each.session.waits is not None:
            session.waits = None
        if pending is not None or session.ids or session.finished:
            self.zombies.append(Zombie(session, nth, pending))

    def _commit(self, session: Session, effects: tuple[int, ...]) -> None:
        received = [(nth, state) for _, nth, state, _ in session.rows]
        self.database.commit(session)
        for nth in effects:
            if nth in self.effects:
                raise Broken("once", f"event {nth} has its effects twice")
            self._require_order(nth)
            self.effects.append(nth)
        for _, state in received:
            self.covered.add(f"received {state}")

    def _require_order(self, nth: int) -> None:
        log = next(each for each in self.of.plan.log if nth in each)
        keys, kinds = self.of.plan.setting.keys, self.of.plan.setting.kinds
        if nth in self.excused:
            return
        for earlier in log[: log.index(nth)]:
            if (
                keys[earlier] == keys[nth]
                and earlier not in self.effects
                and earlier not in self.excused
                and kinds[earlier] != _WITHOUT_HANDLER
            ):
                raise Broken("order", f"event {nth} is handled before event {earlier} of its key")

    def _require_blame(self) -> None:
        setting = self.of.plan.setting
        # An attempt that goes on may still revive what another process took for dead.
        claimed = {each.claimed for each in self.processes if each is not None}
        for seq, (nth, state, _, _) in self.database.inbox.items():
            if state != "failed":
                continue
            self.covered.add("dead letter")
            if not setting.blocks:
                self.excused.add(nth)
            if self.of.plan.is_slow or self.cut >= setting.attempts or seq in claimed:
                continue
            if setting.kinds[nth] not in _GUILTY:
                raise Broken("blame", f"event {nth} is a dead letter, and could be handled")
            if self.tries[nth] + self.cut < setting.attempts:
                raise Broken("blame", f"event {nth} is a dead letter after {self.tries[nth]} attempts")

    # What must hold.

    def check(self) -> None:
        kinds = self.of.plan.setting.kinds
        rows = {row[0]: row[1] for row in self.database.inbox.values()}
        recorded = self.database.processed
        for nth in recorded:
            if nth not in self.effects and rows.get(nth) not in (*OPEN, "discarded"):
                raise Broken("accounted", f"event {nth} is recorded, was not handled and is not in the inbox")
        for nth in self.effects:
            if nth not in recorded:
                raise Broken("once", f"event {nth} is handled and not recorded")
            if rows.get(nth) in OPEN:
                raise Broken("once", f"event {nth} is handled and waits to be handled again")
        for log, offset in zip(self.of.plan.log, self.offsets, strict=True):
            for nth in log[:offset]:
                if nth not in recorded and kinds[nth] != _WITHOUT_HANDLER:
                    raise Broken("accounted", f"event {nth} is behind the committed offset, and is nowhere")

    def is_done(self) -> bool:
        setting = self.of.plan.setting
        if any(offset < len(log) for log, offset in zip(self.of.plan.log, self.offsets, strict=True)):
            return False
        rows = [(row[0], row[1]) for _, row in sorted(self.database.inbox.items())]
        dead = {setting.keys[nth] for nth, state in rows if state == "failed"} if setting.blocks else set()
        return not any(state == "waiting" and setting.keys[nth] not in dead for nth, state in rows)

    def key(self) -> Key:
        return self._key((self.total, tuple(sorted(self.faults.items())), self.cut))

    def live_key(self) -> Key:
        return self._key(())

    def _key(self, more: tuple[Any, ...]) -> Key:
        same = (
            more,
            *self.database.key()[:2],
            tuple(sorted(self.database.crashes.items())),
            tuple(self.offsets),
            self.is_service_up,
            tuple(self.effects),
            tuple(sorted(self.excused)),
            tuple(self.tries),
        )
        processes = [None if each is None else each.key() for each in self.processes]
        zombies = [each.key() for each in self.zombies]
        ways = self.of.ways
        if len(ways) == 1:
            return same, self._named(ways[0], processes, zombies)
        named = (self._named(way, processes, zombies) for way in ways)
        return same, min(marshal.dumps(each, 2) for each in named)

    def _named(self, way: tuple[int, ...], processes: list[Any], zombies: list[Any]) -> tuple[Any, ...]:
        """What has to do with processes, which have other numbers: they are interchangeable."""
        new = {nth: to for to, nth in enumerate(way)} | {_DEAD: _DEAD, None: None}
        left = [(new[owner], *rest) for owner, *rest in zombies]
        return (
            tuple([processes[nth] for nth in way]),
            tuple(sorted(left, key=repr)) if len(left) > 1 else tuple(left),
            tuple([new[each] for each in self.group]),
            tuple(sorted((place, new[to]) for place, to in self.moving.items())),
            tuple(sorted((place, new[owner]) for place, owner in self.database.owners.items())),
        )

    # For readers.

    def actor(self, action: Action) -> Action:
        """Who does it: a process takes one way after the other."""
        return action[:2] if action[0] in ("poll", "serve", "skip", "step", "look", "end") else action

    def tell(self, action: Action) -> str:
        name, *given = action
        if name == "step":
            asked, *about = self._request(given[0])
            again = " goes on with" if self._process(given[0]).session.waits else ":"
            return f"process {given[0]}{again} {asked} {' '.join(map(str, about))}".rstrip()
        if name == "poll":
            what = f"messages of partitions {given[2]}" if given[2] else "no messages"
            return f"process {given[0]} polls{' later' if given[1] else ''}: {what}, {self._heard(given[0])}"
        if name == "lose":
            return f"process {given[0]} loses its connection at {' '.join(map(str, self._request(given[0])))}"
        if name == "crash":
            return f"process {given[0]} is killed at {' '.join(map(str, self._request(given[0])))}"
        if name in ("late", "reap"):
            zombie = self.zombies[given[0]]
            done = f"does {zombie.pending}" if name == "late" else "rolls back"
            return f"the session that was left {done}"
        texts = {
            "start": "process {} starts",
            "serve": "process {} hears of its group",
            "skip": "process {} goes on without a word to Kafka",
            "look": "process {} looks at the inbox",
            "end": "process {} ends",
            "stop": "process {} gets SIGTERM",
            "victim": "process {}: the database chooses another transaction",
            "expel": "process {} is no longer in the group, and does not know",
            "move": "the group moves partition {} to process {}",
            "assign": "the group gives partition {} to process {}",
            "due": "row {} of the inbox is due",
            "outage": "the service goes down",
            "heal": "the service is up again",
            "replay": "an operator replays row {}",
            "discard": "an operator discards row {}",
        }
        return texts[name].format(*given)

    def _heard(self, nth: int) -> str:
        return ", ".join(f"{kind} {place}" for kind, place in self._process(nth).callbacks) or "no changes"
