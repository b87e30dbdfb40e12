"""Record what a real relay's settling thread asks and is answered, and play it to the core again.

The core here is `Settler`, `Retries` and `Quarantine`.

Invariants:
- As of `tape`. What other threads do with the same objects in between is an answer: the queue of released
  batches, the pause that the reader requests, the breaker's state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

from outbox_pipelines.relay.core.batch import ReleasedBatch
from outbox_pipelines.relay.core.quarantine import Quarantine
from outbox_pipelines.relay.core.retries import Retries
from outbox_pipelines.relay.core.settler import Settler
from tests.model.relay.tape import Played, Recorded, Tape

_CALLBACK = "may take large"
_END = "end of the rows"


class SettlingRecording:
    """One relay's settling thread, from its beginning to its end, or for `limit` entries."""

    def __init__(self, limit: int | None = None) -> None:
        self.tape = Tape(limit)
        self._numbers: dict[str, Any] = {}
        self._settler: dict[str, Any] = {}

    def retries(
        self, table: Any, blocked: Any, prober: Any, quarantine: Any, *, counters: Any, **named: Any
    ) -> Retries:
        """Make the real one, with the tape between it and its ports."""
        ports, self._numbers = _divided(named)
        for name in ("topics", "blocked", "clock"):
            setattr(quarantine, f"_{name}", Recorded(self.tape, name, getattr(quarantine, f"_{name}")))
        return _Retries(
            self.tape,
            _RecordedTable(self.tape, "table", table),
            Recorded(self.tape, "blocked", blocked),
            Recorded(self.tape, "prober", prober),
            quarantine,
            counters=counters,
            **{name: Recorded(self.tape, name, each) for name, each in ports.items()},
            **self._numbers,
        )

    def settler(
        self, shard: Any, ledger: Any, blocked: Any, retries: Any, breaker: Any, **named: Any
    ) -> Settler:
        """The same."""
        ports, numbers = _divided(named)
        self._settler = {**numbers, "position": shard.position}
        made = _Settler(
            self.tape,
            Recorded(self.tape, "shard", shard),
            Recorded(self.tape, "ledger", ledger),
            Recorded(self.tape, "blocked", blocked),
            retries,
            Recorded(self.tape, "breaker", breaker),
            **{name: Recorded(self.tape, name, each) for name, each in ports.items()},
            **numbers,
        )
        made.barrier_pause = Recorded(self.tape, "pause", made.barrier_pause)  # type: ignore[assignment]
        return made

    def play(self) -> None:
        """Have the core do it again."""
        tape = self.tape
        ports: dict[str, Any] = {
            name: Played(tape, name)
            for name in (
                *("blocked", "prober", "topics", "clock", "topic_of", "policy_of", "jitter", "may_isolate"),
                "pause",
                *("on_dead_letter", "on_crash", "on_settled", "breaker", "is_stopped", "shard"),
            )
        }
        queue = _PlayedQueue(tape)
        quarantine = Quarantine(ports["topics"], ports["blocked"], ports["clock"])
        names = ("clock", "topic_of", "policy_of", "jitter", "may_isolate", "on_dead_letter", "on_crash")
        table: Any = _PlayedTable(tape, "table")
        counters: Any = SimpleNamespace(published=lambda events: None, rejected=lambda reasons: None)
        retries = Retries(
            table,
            ports["blocked"],
            ports["prober"],
            quarantine,
            counters=counters,
            **{name: ports[name] for name in names},
            **self._numbers,
        )
        retries.released = queue  # type: ignore[assignment]
        place: Any = SimpleNamespace(position=self._settler.pop("position"))
        ledger: Any = _PlayedLedger(tape, queue)
        settler = Settler(
            place,
            ledger,
            ports["blocked"],
            retries,
            ports["breaker"],
            **{name: ports[name] for name in ("clock", "is_stopped", "on_settled", "on_dead_letter")},
            **self._settler,
        )
        settler._shard, settler.barrier_pause = ports["shard"], ports["pause"]
        calls: dict[str, Callable[[Any], Any]] = {
            "begin": lambda given: retries.begin(crashed=given),
            "close": lambda given: retries.close(),
            "settle": lambda given: settler.settle(last=given),
            "advance": lambda given: settler.advance(),
        }
        tape.play_drives(lambda name, given: calls[name](given))


def _divided(named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is called, and what is a number."""
    ports = {name: each for name, each in named.items() if callable(each)}
    return ports, {name: each for name, each in named.items() if name not in ports}


class _Retries(Retries):
    """The real ones, whose calls by the driver are recorded."""

    def __init__(self, tape: Tape, *given: Any, **named: Any) -> None:
        self._tape = tape
        super().__init__(*given, **named)

    @property
    def released(self) -> Any:
        """For the settling thread the queue is a port, for others it is the queue."""
        return _RecordedQueue(self._tape, self._queue) if self._tape.is_recording else self._queue

    @released.setter
    def released(self, queue: Any) -> None:
        self._queue = queue

    def begin(self, *, crashed: bool) -> None:
        self._tape.drive("begin", crashed, lambda: super(_Retries, self).begin(crashed=crashed))

    def close(self) -> None:
        self._tape.drive("close", None, super().close)


class _Settler(Settler):
    def __init__(self, tape: Tape, *given: Any, **named: Any) -> None:
        self._tape = tape
        super().__init__(*given, **named)

    def settle(self, *, last: bool = False) -> int | None:
        settled: int | None = self._tape.drive(
            "settle", last, lambda: super(_Settler, self).settle(last=last)
        )
        return settled

    def advance(self) -> None:
        self._tape.drive("advance", None, super().advance)


class _RecordedQueue:
    """The queue of released batches, to which the publishing thread has access at the same time."""

    def __init__(self, tape: Tape, queue: Any) -> None:
        self._tape, self._queue = tape, queue

    def append(self, released: ReleasedBatch) -> None:
        self._tape.record("released.append", released, lambda: [released])
        self._queue.append(released)

    def __iter__(self) -> Iterator[ReleasedBatch]:
        return iter(self._tape.record("released", None, lambda: list(self._queue)))


class _PlayedQueue:
    """The same from a tape. The core makes batches of its own, which take the place of the recorded ones."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._ours: dict[int, ReleasedBatch] = {}

    def append(self, released: ReleasedBatch) -> None:
        [was] = self._tape.play("released.append", released)
        self._ours[id(was)] = released

    def __iter__(self) -> Iterator[ReleasedBatch]:
        return map(self.ours, self._tape.play("released", None))

    def ours(self, was: Any) -> Any:
        """What the core has in the place of a recorded batch."""
        return self._ours.get(id(was), was)


class _PlayedLedger(Played):
    def __init__(self, tape: Tape, queue: _PlayedQueue) -> None:
        super().__init__(tape, "ledger")
        self.__dict__["queue"] = queue

    def call(self, name: str, given: Any, named: Any) -> Any:
        answer = super().call(name, given, named)
        if name != "ledger.take":
            return answer
        batches, requests = answer
        taken = [copy.copy(each) for each in batches]
        for each in taken:
            each.batch = self.__dict__["queue"].ours(each.batch)
        return taken, requests


class _RecordedTable(Recorded):
    """Also notes each row that is read, and that it asks whether it may be a large one."""

    def call(self, name: str, attribute: str, given: Any, named: Any) -> Any:
        if attribute != "read":
            return super().call(name, attribute, given, named)
        seqs, may_take_large = given

        def asks() -> bool:
            self.tape.note(_CALLBACK, None)
            allowed: bool = may_take_large()
            return allowed

        return self._rows(self.real.read(seqs, asks), seqs)

    def _rows(self, rows: Any, seqs: Any) -> Generator[Any]:
        try:
            while (row := self.tape.record("table.read", seqs, lambda: next(rows, _END))) != _END:
                yield row
        finally:
            rows.close()


class _PlayedTable(Played):
    def call(self, name: str, given: Any, named: Any) -> Any:
        if name != "table.read":
            return super().call(name, given, named)
        return self._rows(*given)

    def _rows(self, seqs: Any, may_take_large: Callable[[], bool]) -> Generator[Any]:
        def between(asked: str, given: Any) -> None:
            assert asked == _CALLBACK
            self.tape.at += 1
            may_take_large()

        while (row := self.tape.play("table.read", seqs, between)) != _END:
            yield row
