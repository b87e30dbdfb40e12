"""The model of PostgreSQL against the real one: the same statements, by two sessions, have the same answers.

Histories are random, with seeds; statements are those of the production code.
"""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer import migrate
from outbox_pipelines.consumer.consumer import drive
from outbox_pipelines.consumer.inbox import Arrival, Inbox, Waiting, array
from outbox_pipelines.consumer.partition_owners import CrashGuard
from outbox_pipelines.consumer.processed_events import bucket
from outbox_pipelines.local import Stack
from tests.conftest import fresh_database, wait_until
from tests.model.consumer.database import Blocked, Database, Session
from tests.model.consumer.process import TOPIC, Message, Setting, message_id, number

KEYS = ("a", "a", "a", "b")
SETTING = Setting(("works",) * len(KEYS), KEYS)
_SENT = Message(SETTING, 0, 0, 0).timestamp()
_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"


HOLDS = ("RECORD", "RECORD_MANY", "RECEIVE", "FINISH")


class Real:
    """One session of the real database, as the production code uses it."""

    warnings = 0

    def __init__(self, dsn: str, owner: UUID, *, blocks: bool) -> None:
        self.connection = psycopg.connect(dsn)
        self.connection.execute("SET lock_timeout = '60s'")
        self.connection.commit()
        self.holds = False
        self.inbox = Inbox(self, "model", blocks=blocks, retry_seconds=100)
        self.guard = CrashGuard(self, "model", "model")
        self.guard._same = {**self.guard._same, "owner": str(owner)}
        self.same = {"source": "model", "block": blocks}

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        yield self.connection
        if not self.holds:
            self.connection.commit()

    async def rows(self, transaction: Any, query: str, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        cursor = transaction.execute(query.encode(), given)
        return cursor.fetchall() if cursor.description else []

    async def require_open(self, transaction: Any) -> None: ...

    async def end_handling(self, transaction: Any, following: object = None) -> bool:
        return True

    def abort(self) -> None:
        """Nothing waits for an answer of a database."""

    async def close(self) -> None: ...

    def run(self, name: str, *given: Any) -> Any:
        """Execute a statement; the transactions of some stay open."""
        self.holds = name in HOLDS
        return getattr(self, f"_{name.lower()}")(*given)

    def end(self, *, commits: bool) -> None:
        if commits:
            self.connection.execute(queries.END_HANDLING.encode())
            self.connection.commit()
        else:
            self.connection.rollback()

    def _query(self, query: str, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        async def read() -> list[tuple[Any, ...]]:
            async with self.transaction() as transaction:
                return await self.rows(transaction, query, {**self.same, **given})

        return drive(read())

    def _record(self, nth: int) -> bool:
        event_id = message_id(nth)
        given = {"id": str(event_id), "bucket": bucket(event_id), "topic": TOPIC, "key": KEYS[nth]}
        return bool(self._query(queries.RECORD, {**given, "content": None}))

    def _many(self, ids: tuple[int, ...]) -> dict[str, Any]:
        return {
            "ids": array([str(message_id(nth)) for nth in ids]),
            "topics": array([TOPIC for _ in ids]),
            "keys": array([KEYS[nth] for nth in ids]),
            "contents": None,
        }

    def _record_many(self, ids: tuple[int, ...]) -> list[int]:
        [(count, _, new)] = self._query(queries.RECORD_MANY, self._many(ids))
        return sorted(ids if count == len(ids) else [number(text) for text in new or ()])

    def _taken(self, ids: tuple[int, ...]) -> bool:
        return bool(self._query(queries.TAKEN, self._many(ids))[0][0])

    def _known(self, ids: tuple[int, ...]) -> list[int]:
        events = [message_id(nth) for nth in ids]
        given = {"ids": [str(each) for each in events], "buckets": list({bucket(each) for each in events})}
        return sorted(number(text) for (text,) in self._query(queries.KNOWN, given))

    def _receive(self, ids: tuple[int, ...], is_dead: bool, begun: int) -> list[int]:
        messages = [Message(SETTING, nth, 0, nth) for nth in ids]
        arrivals = [
            Arrival(message_id(nth), KEYS[nth], "works", message, _sent(message))
            for nth, message in zip(ids, messages, strict=True)
        ]
        found = drive(self.inbox.receive(arrivals, attempts=begun, dead=is_dead))
        return [number(each) for each in sorted(found, key=lambda each: found[each])]

    def _heads(self) -> list[tuple[int, int]]:
        return [(each.seq, each.attempts) for each in drive(self.inbox.heads())]

    def _next(self, seq: int) -> tuple[int, int] | None:
        found = drive(self.inbox.next(seq))
        return None if found is None else (found.seq, found.attempts)

    def _claim(self, seq: int, begun: int) -> bool:
        return drive(self.inbox.claim(Waiting(seq, begun, "works"))) is not None

    def _read(self, seq: int, begun: int) -> bool:
        return drive(self.inbox.read(Waiting(seq, begun, "works"))) is not None

    def _finish(self, seq: int, begun: int) -> bool:
        return bool(drive(self.inbox.finish(self.connection, seq, begun)))

    def _missed(self, seq: int, begun: int, is_dead: bool, counts: bool) -> None:
        pause = None if counts else 30.0
        drive(self.inbox.missed(seq, begun, "an error", dead=is_dead, pause=pause))

    def _take_back(self, seqs: tuple[int, ...]) -> None:
        drive(self.inbox.take_back(seqs, 30.0))

    def _hurry(self, seqs: tuple[int, ...]) -> None:
        drive(self.inbox.hurry(seqs))

    def _own_free(self, places: tuple[int, ...], most: int) -> list[tuple[int, bool]]:
        rows = drive(self.guard._run(queries.OWN_FREE, [(TOPIC, each) for each in places], crashes=most))
        return sorted((partition, is_ours) for _, partition, is_ours in rows)

    def _own(self, places: tuple[int, ...]) -> None:
        drive(self.guard._run(queries.OWN, [(TOPIC, each) for each in places]))

    def _disown(self, places: tuple[int, ...]) -> None:
        drive(self.guard._run(queries.DISOWN, [(TOPIC, each) for each in places]))


def _sent(message: Message) -> Any:
    from outbox_pipelines.consumer.kafka_messages import sent_at

    return sent_at(message)  # type: ignore[arg-type]


class Both:
    """The model and the real one, side by side."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.told: list[str] = []
        blocks = seed % 2 == 1
        self.model = Database(KEYS, blocks=blocks)
        self.sessions = [Session(), Session()]
        self.model.sessions = self.sessions
        self.owners = [UUID(int=1), UUID(int=2)]
        self.real = [Real(dsn, owner, blocks=blocks) for owner in self.owners]
        self.operator = psycopg.connect(dsn, autocommit=True)
        self.open = [False, False]
        self.waiting: dict[int, tuple[threading.Thread, list[Any], tuple[Any, ...]]] = {}

    def close(self) -> None:
        for thread, *_ in self.waiting.values():
            assert not thread.is_alive()
        for each in self.real:
            each.connection.close()
        self.operator.close()

    def seqs(self) -> dict[int, int]:
        """Of each event in the model's inbox: the real number."""
        rows = self.operator.execute("SELECT message_id, seq FROM inbox").fetchall()
        return {number(event_id): seq for event_id, seq in rows}

    def step(self) -> None:
        who = self.chance.randrange(2)
        if who in self.waiting:
            who = 1 - who
        if self.open[who]:
            self.end(who, commits=self.chance.random() < 0.7)
        elif self.chance.random() < 0.15 and not self.waiting:
            self.by_others()
        else:
            self.statement(who)

    def finish(self) -> None:
        for who in (0, 1, 0):
            if self.open[who] and who not in self.waiting:
                self.end(who, commits=True)
        self.compare()

    def end(self, who: int, *, commits: bool) -> None:
        self.told.append(f"{who} {'commits' if commits else 'rolls back'}")
        self.real[who].end(commits=commits)
        if commits:
            self.model.commit(self.sessions[who])
        else:
            self.sessions[who].clear()
        self.open[who] = False
        other = 1 - who
        if other in self.waiting:
            thread, found, asked = self.waiting.pop(other)
            thread.join(600)
            assert not thread.is_alive(), self.told
            expected = self._model(other, asked)
            self.told.append(f"{other} goes on: {expected}")
            assert found == [expected], self.told
        if not any(self.open):
            self.compare()

    def by_others(self) -> None:
        """Time, and operators."""
        name = self.chance.choice(["due", "replay", "discard"])
        real = self.seqs()
        for seq, (nth, state, *_) in self.model.inbox.items():
            if any(seq in each.finished for each in self.sessions):
                continue
            if name == "due" and state == "waiting":
                self.model.become_due(seq)
                changed = "next_attempt_at = now() - interval '1 s'"
            elif name == "replay" and state == "failed":
                self.model.replay(seq)
                changed = "state = 'waiting', attempts = 0, next_attempt_at = now() - interval '1 s'"
            elif name == "discard" and state == "failed":
                self.model.discard(seq)
                changed = "state = 'discarded'"
            else:
                continue
            self.told.append(f"{name} {nth}")
            self.operator.execute(f"UPDATE inbox SET {changed} WHERE seq = %s", [real[nth]])

    def statement(self, who: int) -> None:
        asked = self._asked()
        self.told.append(f"{who} {asked}")
        real = self._real(asked)
        self.open[who] = asked[0] in HOLDS
        try:
            expected = self._model(who, asked)
        except Blocked:
            found: list[Any] = []
            nths = self._nths()
            thread = threading.Thread(
                target=lambda: found.append(self._seen(self.real[who].run(*real), asked, nths))
            )
            thread.start()
            self.waiting[who] = thread, found, asked
            pid = self.real[who].connection.info.backend_pid
            wait_until(
                lambda: self.operator.execute(_WAITS, [pid]).fetchone() == (1,), what=f"a wait: {self.told}"
            )
            self.told.append(f"{who} waits")
            return
        found_now = self._seen(self.real[who].run(*real), asked, self._nths())
        assert found_now == expected, [*self.told, found_now, expected]

    def _asked(self) -> tuple[Any, ...]:
        """A statement with the model's numbers."""
        chance = self.chance
        ids = tuple(chance.sample(range(len(KEYS)), chance.randint(1, 3)))
        places = tuple(sorted(chance.sample(range(2), chance.randint(1, 2))))
        kinds: list[Callable[[], tuple[Any, ...]]] = [
            lambda: ("RECORD", ids[0]),
            lambda: ("RECORD_MANY", ids),
            lambda: ("RECEIVE", ids, chance.random() < 0.3, chance.randint(0, 1)),
            lambda: ("KNOWN", ids),
            lambda: ("TAKEN", ids),
            lambda: ("HEADS",),
            lambda: (chance.choice(["OWN", "DISOWN"]), places),
            lambda: ("OWN_FREE", places, chance.randint(0, 1)),
        ]
        if self.model.inbox:
            seq = chance.choice([*self.model.inbox])
            begun = max(0, self.model.inbox[seq][2] - (chance.random() < 0.2))
            about_rows: list[Callable[[], tuple[Any, ...]]] = [
                lambda: ("NEXT", seq),
                lambda: ("CLAIM", seq, begun),
                lambda: ("READ", seq, begun),
                lambda: ("FINISH", seq, begun),
                lambda: ("MISSED", seq, begun, chance.random() < 0.5, chance.random() < 0.7),
                lambda: ("HURRY", (seq,)),
                lambda: ("TAKE_BACK", (seq,)),
            ]
            kinds += about_rows * 2
        return chance.choice(kinds)()

    def _nths(self) -> dict[int, int]:
        return {seq: nth for nth, seq in self.seqs().items()}

    def _real(self, asked: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same with the real numbers of rows."""
        name, *given = asked
        if name in ("NEXT", "CLAIM", "READ", "FINISH", "MISSED"):
            return name, self.seqs()[self.model.inbox[given[0]][0]], *given[1:]
        if name in ("HURRY", "TAKE_BACK"):
            return name, tuple(self.seqs()[self.model.inbox[each][0]] for each in given[0])
        return asked

    def _model(self, who: int, asked: tuple[Any, ...]) -> Any:
        name, *given = asked
        if name == "RECEIVE":
            given = [given[0], "failed" if given[1] else "waiting", given[2]]
        elif name == "MISSED":
            given = [given[0], given[1], "failed" if given[2] else "waiting", 0 if given[3] else 1]
        elif name == "TAKEN":
            given = [tuple(KEYS[nth] for nth in given[0])]
        elif name == "HEADS":
            given = [()]
        answer = self.model.run(self.sessions[who], who, name, *given)
        if name in ("RECORD_MANY", "KNOWN", "OWN_FREE"):
            return sorted(answer)
        if name == "RECEIVE":
            return [nth for _, nth in answer]
        if name == "HEADS":
            # Of different keys: which one is tried first changes no guarantee.
            return sorted((nth, begun) for _, begun, nth in answer)
        if name == "NEXT":
            return (answer[0][2], answer[0][1]) if answer else None
        if name in ("CLAIM", "READ"):
            return answer is not None
        return answer

    def _seen(self, answer: Any, asked: tuple[Any, ...], nths: dict[int, int]) -> Any:
        """A real answer, with events in place of rows."""
        if asked[0] == "HEADS":
            return sorted((nths[seq], begun) for seq, begun in answer)
        if asked[0] == "NEXT":
            return answer and (nths[answer[0]], answer[1])
        return answer

    def compare(self) -> None:
        """What is committed is the same."""
        processed = self.operator.execute("SELECT event_id FROM processed_events").fetchall()
        assert sorted(number(event_id) for (event_id,) in processed) == sorted(self.model.processed), (
            self.told
        )
        rows = self.operator.execute(
            "SELECT message_id, state, attempts, next_attempt_at <= now() FROM inbox ORDER BY seq"
        ).fetchall()
        real = [(number(row[0]), *row[1:]) for row in rows]
        model = [tuple(row) for _, row in sorted(self.model.inbox.items())]
        is_open = ("waiting",)
        assert [each[:3] for each in real] == [each[:3] for each in model], self.told
        assert [each for each in real if each[1] in is_open] == [
            each for each in model if each[1] in is_open
        ], self.told
        owners = self.operator.execute("SELECT partition, owner, crashes FROM partition_owners").fetchall()
        assert {place: self.owners.index(owner) for place, owner, _ in owners} == self.model.owners, self.told
        assert {place: crashes for place, _, crashes in owners if crashes} == self.model.crashes, self.told


@pytest.fixture(scope="module")
def dsn(stack: Stack) -> Iterator[str]:
    with fresh_database(stack.dsn) as dsn:
        with psycopg.connect(dsn) as connection:
            migrate(connection)
        yield dsn


@contextmanager
def _both(dsn: str, seed: int) -> Iterator[Both]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE processed_events, inbox, partition_owners")
    both = Both(dsn, seed)
    yield both
    both.close()


def test_the_same_statements_have_the_same_answers(dsn: str) -> None:
    waits = 0
    for seed in range(40):
        with _both(dsn, seed) as both:
            for _ in range(40):
                both.step()
            both.finish()
            waits += sum(each.endswith("waits") for each in both.told)
    # Otherwise nothing is said of transactions that meet.
    assert waits > 10
