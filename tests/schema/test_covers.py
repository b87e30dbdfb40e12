"""`outbox_covers` against a model that keeps sets."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.schema.servers import Connection

COVERS = """
SELECT outbox_covers(done::pg_snapshot, target::pg_snapshot, last_seq, tx::xid8, seq)
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[]) WITH ORDINALITY
     AS c (done, target, last_seq, tx, seq, n)
ORDER BY n"""


class Snapshot(NamedTuple):
    """Which transactions, of the numbers 3 to 19, are over."""

    over: frozenset[int]
    xmax: int

    def __str__(self) -> str:
        running = [tx for tx in range(3, self.xmax) if tx not in self.over]
        return f"{min(running, default=self.xmax)}:{self.xmax}:{','.join(map(str, running))}"


class Case(NamedTuple):
    done: Snapshot
    target: Snapshot | None
    last_seq: int | None
    tx: int
    seq: int

    @property
    def covered(self) -> bool:
        """All of `done`; and what `target` sees, up to `last_seq`."""
        if self.tx in self.done.over:
            return True
        if self.target is None or self.last_seq is None:
            return False
        return self.tx in self.target.over and self.seq <= self.last_seq


def case(chance: random.Random) -> Case:
    def later(snapshot: Snapshot) -> Snapshot:
        xmax = chance.randint(snapshot.xmax, 19)
        new = {tx for tx in range(3, xmax) if chance.random() < 0.7}
        return Snapshot(snapshot.over | new, xmax)

    done = later(Snapshot(frozenset(), 3))
    in_tick = chance.random() < 0.7
    return Case(
        done,
        later(done) if in_tick else None,
        chance.randint(0, 10) if in_tick else None,
        chance.randint(3, 19),
        chance.randint(1, 10),
    )


def test_it_says_what_the_model_says(connection: Connection) -> None:
    """Guards against a position that covers what was not published (loss when a day is dropped), and NULL for
    an answer."""
    chance = random.Random(20_240_229)
    cases = [case(chance) for _ in range(5_000)]
    columns = [
        [str(each.done) for each in cases],
        [str(each.target) if each.target else None for each in cases],
        [each.last_seq for each in cases],
        [str(each.tx) for each in cases],
        [each.seq for each in cases],
    ]
    answers = [covered for (covered,) in connection.execute(COVERS, columns)]
    assert [
        (each, answer) for each, answer in zip(cases, answers, strict=True) if each.covered is not answer
    ] == []
    # All four kinds occur often enough to mean something.
    kinds = [(each.target is None, each.covered) for each in cases]
    assert min(kinds.count((a, b)) for a in (True, False) for b in (True, False)) > 200
