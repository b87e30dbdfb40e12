"""Whether a fleet may leave an outbox unread: every order of steps of writers, the watcher and a reader."""

from __future__ import annotations

import random

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.relay.fleet.watch import Quiet


class Database:
    """Transaction ids, a sequence, and what is committed; as PostgreSQL hands them out."""

    def __init__(self) -> None:
        self.next_tx = 100
        self.last_ended = 99
        self.last: int | None = None
        self.running: set[int] = set()
        self.committed: dict[int, int] = {}
        """Events: the transaction of each seq."""
        self.unfinished: dict[int, list[int]] = {}

    def begin(self) -> int:
        tx, self.next_tx = self.next_tx, self.next_tx + 1
        self.running.add(tx)
        self.unfinished[tx] = []
        return tx

    def insert(self, tx: int) -> None:
        self.last = (self.last or 0) + 1
        self.unfinished[tx].append(self.last)

    def end(self, tx: int, *, commits: bool) -> None:
        self.running.remove(tx)
        self.last_ended = max(self.last_ended, tx)
        events = self.unfinished.pop(tx)
        if commits:
            self.committed |= dict.fromkeys(events, tx)

    def snapshot(self) -> Snapshot:
        """As PostgreSQL makes it: transactions that began after the last one that ended are not in it."""
        end = self.last_ended + 1
        running = tuple(sorted(tx for tx in self.running if tx < end))
        return Snapshot(min(running, default=end), end, running)

    @property
    def age(self) -> bytes:
        return str(self.next_tx - 3).encode()

    @property
    def number(self) -> bytes:
        return b"" if self.last is None else str(self.last).encode()


def test_no_event_stays_unread() -> None:
    """Guards against an event that commits late, after a gap, or beside others, and is not noticed."""
    assert sum(map(_quiet_looks, range(2000))) > 5000


def _quiet_looks(seed: int) -> int:
    choose, database, quiet = random.Random(seed), Database(), Quiet()
    done: Snapshot | None = None
    looks = 0
    for _ in range(60):
        step = choose.choice(["begin", "insert", "commit", "roll back", "look", "look", "crash"])
        running = sorted(database.running)
        if step == "begin":
            tx = database.begin()
            if choose.random() < 0.5:
                database.insert(tx)
        elif step == "insert" and running:
            database.insert(choose.choice(running))
        elif step in ("commit", "roll back") and running:
            database.end(choose.choice(running), commits=step == "commit")
        elif step == "crash" and choose.random() < 0.1:
            # PostgreSQL logs the sequence ahead: after a crash it goes on higher.
            for tx in running:
                database.end(tx, commits=False)
            database.last = (database.last or 0) + 32
        elif step == "look":
            snapshot = database.snapshot()
            # Others write between the snapshot of the question and its answer.
            if choose.random() < 0.3:
                database.insert(database.begin())
            if done is None or quiet.is_new(str(snapshot).encode(), database.number, database.age):
                # They write before the reader looks, too.
                if choose.random() < 0.3 and database.running:
                    database.end(choose.choice(sorted(database.running)), commits=True)
                done = database.snapshot()
                quiet.has_read(done)
            else:
                unread = [seq for seq, tx in database.committed.items() if not done.sees(tx)]
                visible = [seq for seq in unread if snapshot.sees(database.committed[seq])]
                assert not visible, f"committed, and left unread: {visible}"
                looks += 1
    return looks


def test_neighbors_are_no_news() -> None:
    """Guards against an idle outbox that is read because others write."""
    database, quiet = Database(), Quiet()
    writer = database.begin()
    database.insert(writer)
    assert quiet.is_new(str(database.snapshot()).encode(), database.number, database.age)
    quiet.has_read(database.snapshot())
    for _ in range(3):
        database.end(database.begin(), commits=True)
        assert not quiet.is_new(str(database.snapshot()).encode(), database.number, database.age)
    database.end(writer, commits=True)
    assert quiet.is_new(str(database.snapshot()).encode(), database.number, database.age)
    quiet.has_read(database.snapshot())
    neighbor = database.begin()
    quiet.has_read(database.snapshot())
    database.end(neighbor, commits=True)
    assert not quiet.is_new(str(database.snapshot()).encode(), database.number, database.age)


def test_without_a_sequence_the_snapshot_decides() -> None:
    """Guards against a role that may not read the sequence, and is never woken."""
    database, quiet = Database(), Quiet()
    quiet.has_read(database.snapshot())
    assert not quiet.is_new(str(database.snapshot()).encode(), None, database.age)
    database.end(database.begin(), commits=True)
    assert quiet.is_new(str(database.snapshot()).encode(), None, database.age)
