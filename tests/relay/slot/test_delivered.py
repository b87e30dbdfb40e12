"""The set of transactions that a slot has delivered: exact, whatever ends in whatever order."""

from __future__ import annotations

import random

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.relay.read.slot.delivered import Delivered
from tests.relay.faults import seed


class _Server:
    """Transactions that begin and end at random; some write events, some nothing, some are rolled back."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.next = 100
        self.running: dict[int, str] = {}
        self.committed: list[int] = []
        """With events, in the order of commits."""

    def snapshot(self) -> Snapshot:
        running = tuple(sorted(self.running))
        return Snapshot(running[0] if running else self.next, self.next, running)

    def step(self) -> None:
        if self.running and self.chance.random() < 0.5:
            tx = self.chance.choice(sorted(self.running))
            if self.running.pop(tx) == "event":
                self.committed.append(tx)
        else:
            self.running[self.next] = self.chance.choice(["event", "event", "nothing", "rolled back"])
            self.next += 1


def _ask(server: _Server, delivered: Delivered) -> None:
    question = delivered.question
    found = [tx for tx in server.committed if question.first <= tx < question.end or tx in question.others]
    delivered.answer(server.snapshot(), found)


def test_sees_exactly_what_was_delivered(is_short: bool) -> None:
    """Guards against a position that covers an event which is not published, or publishes one again."""
    first = seed()
    for more in range(40 if is_short else 200):
        _round(random.Random(first + more))


def _round(chance: random.Random) -> None:
    server = _Server(chance)
    for _ in range(chance.randrange(30)):
        server.step()
    done = server.snapshot()
    before = set(server.committed)
    at = len(server.committed)
    delivered = Delivered(done)
    for _ in range(300):
        server.step()
        if chance.random() < 0.3 and at < len(server.committed):
            delivered.add(server.committed[at])
            at += 1
        if chance.random() < 0.05:
            delivered.extend(server.snapshot().xmax)
        if chance.random() < 0.1:
            _ask(server, delivered)
        snapshot = delivered.snapshot()
        published = before | set(server.committed[:at])
        # A set of ids is compared where there are events: the others have none.
        for tx in [*server.committed, *(tx for tx, kind in server.running.items() if kind == "event")]:
            assert snapshot.sees(tx) == delivered.sees(tx) == (tx in published)
        assert snapshot.xmin == (snapshot.xip[0] if snapshot.xip else snapshot.xmax)
        assert list(snapshot.xip) == sorted(set(snapshot.xip))
        assert server.snapshot().covers(snapshot) or not published <= set(server.committed)


def test_ids_that_are_no_events_are_forgotten() -> None:
    """Guards against a position that grows with each transaction of another table."""
    delivered = Delivered(Snapshot(10, 10, ()))
    for tx in range(10, 10_000, 10):
        delivered.add(tx)
    assert delivered.unknown == 999 * 9 - 9
    delivered.answer(Snapshot(9_991, 10_050, (5_001, 9_991)), {20, 30, 5_003})
    assert delivered.snapshot().xip == (5_001, 5_003)
    assert delivered.question.others == [5_001]
    # The one ended without an event, the other is delivered.
    delivered.answer(Snapshot(10_050, 10_050, ()), set())
    delivered.add(5_003)
    assert delivered.snapshot().xip == ()
