"""Receive, then process: nothing is lost between the two, and each key keeps its order."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Counts, Event
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.consumer import drive
from outbox_pipelines.consumer.inbox import Inbox, Waiting, array
from outbox_pipelines.consumer.psycopg_transactions import Connections
from tests.conftest import wait_until
from tests.consumer.place import Part, Place, at_work, effect, uuid7

Connection = psycopg.Connection[Any]


def received(place: Place, events: int) -> None:
    """That many events lie in the inbox, and Kafka is done with."""
    place.load(events)
    with at_work(place.consumer(), "receive") as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(received=events)
    assert place.inbox() == {"waiting": events}


def test_what_is_received_is_handled_once_and_in_order(place: Place) -> None:
    received(place, 200)
    assert place.effects() == 0
    assert place.consumer().drain(until_empty=True) == Counts(handled=200)
    for (numbers,) in place.rows("SELECT array_agg(n ORDER BY seq) FROM effects GROUP BY key"):
        assert numbers == sorted(numbers)
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == 200
    assert place.inbox() == {"processed": 200}
    assert place.value("SELECT bool_and(processed_at >= received_at) FROM inbox")


def test_what_comes_again_is_received_once(place: Place) -> None:
    """Guards against a message that lies in the inbox twice, or comes back after it was handled."""
    received(place, 20)
    place.consumer().drain(until_empty=True)
    with at_work(place.consumer(group="again"), "receive") as run:
        wait_until(lambda: place.uncommitted("again") == 0, what="all offsets")
        assert run.end() == Counts(duplicates=20)
    with at_work(place.consumer(group="third"), "run") as run:
        wait_until(lambda: place.uncommitted("third") == 0, what="all offsets")
        assert run.end() == Counts(duplicates=20)
    assert place.effects() == 20


def test_the_event_is_as_it_was_in_kafka(place: Place) -> None:
    """Guards against content that changes while it is stored in the database."""
    [event_id] = place.send(uuid7(), correlation_id="c-1", tenant="Zoë")
    place.put(None, key="2", id="order-7", event_type="order.placed", traceparent="00-" + "a" * 32)
    place.put('{"id": "x\\u0000"}', key=b"a\nb\x80", id="order-8", event_type="order.placed", odd="\u0000")
    direct: list[Event] = []
    stored: list[Event] = []
    for into, group in (direct, "direct"), (stored, "stored"):
        consumer = place.bare(source=group, group=group)
        consumer.on("order.placed")(lambda event, _, into=into: into.append(event))
        with at_work(consumer, "run" if group == "direct" else "receive") as run:
            wait_until(partial(lambda group: place.uncommitted(group) == 0, group), what="all offsets")
            assert run.end().duplicates == 0
        if group == "stored":
            consumer.drain(until_empty=True)
    assert len(stored) == 3
    assert sorted(direct, key=str) == sorted(stored, key=str)
    assert {each.id for each in stored} == {event_id, "order-7", "order-8"}


def test_several_drain_side_by_side(place: Place) -> None:
    """Guards against a message that two have, a key that two work on, and one who waits for the other."""
    received(place, 300)
    overlapped: list[str] = []
    busy: set[str] = set()
    lock = threading.Lock()

    def handler(event: Event, connection: Connection) -> None:
        assert event.aggregate_id
        with lock:
            if event.aggregate_id in busy:
                overlapped.append(event.aggregate_id)
            busy.add(event.aggregate_id)
        effect(event, connection)
        connection.execute("SELECT pg_sleep(0.001)")
        with lock:
            busy.discard(event.aggregate_id)

    runs = []
    for _ in range(3):
        consumer = place.bare()
        consumer.on("order.placed")(handler)
        runs.append(Part(consumer, "drain"))
    try:
        wait_until(lambda: place.inbox() == {"processed": 300}, what="all handled")
    finally:
        counts = [run.end() for run in runs]
    assert sum(each.handled for each in counts) == 300
    assert sum(each.handled > 0 for each in counts) >= 2
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == place.effects() == 300
    assert overlapped == []
    for (numbers,) in place.rows("SELECT array_agg(n ORDER BY seq) FROM effects GROUP BY key"):
        assert numbers == sorted(numbers)


@pytest.mark.extended
@pytest.mark.parametrize("at_once", [True, False])
def test_two_who_claimed_one_message_do_not_both_handle_it(place: Place, at_once: bool) -> None:
    """Guards against an attempt that begins while a slow one before it has not ended."""
    received(place, 1)
    connections = [Connections(lambda: psycopg.connect(place.dsn, autocommit=True)) for _ in range(2)]
    one, other = (Inbox(each, "billing", blocks=False, retry_seconds=0) for each in connections)

    async def scenario() -> None:
        [head] = await one.heads()
        assert await one.claim(head)
        [head] = await other.heads()
        assert await other.claim(head)
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(connections[0].transaction())
            assert await one.finish(first, head.seq, 1)
            await connections[0].rows(first, queries.END_HANDLING, {})
            if not at_once:
                await stack.aclose()
            async with connections[1].transaction() as second:
                assert not await other.finish(second, head.seq, 2)
        for each in connections:
            await each.close()

    drive(scenario())


@pytest.mark.extended
def test_what_another_has_is_waited_for_in_peace(place: Place) -> None:
    """Guards against a process that asks without a pause while another one handles what is due."""
    received(place, 1)
    may_end = threading.Event()
    slow = place.bare(retry_seconds=0)
    slow.on("order.placed")(lambda *_: may_end.wait(600))
    looks: list[int] = []
    with at_work(slow, "drain"), pytest.MonkeyPatch.context() as patch:
        wait_until(lambda: place.value("SELECT sum(attempts) FROM inbox") == 1, what="an attempt")
        heads = Inbox.heads

        def looked(self: Inbox) -> Any:
            looks.append(1)
            return heads(self)

        patch.setattr(Inbox, "heads", looked)
        assert place.consumer(retry_seconds=0).drain(until_empty=True) == Counts()
        with at_work(place.consumer(retry_seconds=0), "drain"):
            wait_until(lambda: len(looks) >= 4, what="some looks")
            before = len(looks)
            with pytest.raises(AssertionError):
                wait_until(lambda: len(looks) > before + 10, seconds=1)
        may_end.set()
        wait_until(lambda: place.inbox() == {"processed": 1}, what="its end")


def test_what_a_key_waits_for(place: Place) -> None:
    """Guards against a key that waits for what is over, or passes a dead letter that it has to wait for."""
    received(place, 1)
    [(topic, key)] = place.rows("SELECT topic, key FROM inbox")
    given = {"source": "billing", "topics": array([topic]), "keys": array([key])}

    def is_taken(state: str, *, block: bool) -> object:
        with psycopg.connect(place.dsn, autocommit=True) as connection:
            connection.execute("UPDATE inbox SET state = %s", [state])
            return connection.execute(queries.TAKEN.encode(), {**given, "block": block}).fetchall()[0][0]

    states = ("waiting", "failed", "processed", "discarded")
    assert [is_taken(state, block=False) for state in states] == [True, False, False, False]
    assert [is_taken(state, block=True) for state in states] == [True, True, False, False]


def test_the_first_of_each_key(place: Place) -> None:
    """Guards against order within a key by chance, keys of others, and heads that never have a turn."""
    rows = {
        "another source": ("other", "t", "d", "waiting", "now"),
        "another topic": ("billing", "u", "d", "waiting", "now"),
        "done": ("billing", "t", "a", "processed", "now"),
        "first": ("billing", "t", "a", "waiting", "yesterday"),
        "second": ("billing", "t", "a", "waiting", "now"),
        "dead": ("billing", "t", "b", "failed", "now"),
        "behind it": ("billing", "t", "b", "waiting", "now"),
        "not due": ("billing", "t", "c", "waiting", "infinity"),
        "behind that": ("billing", "t", "c", "waiting", "now"),
        "discarded": ("billing", "t", "d", "discarded", "now"),
        "last": ("billing", "t", "d", "waiting", "now"),
    }
    all_types = {"held": "{}", "named": "{}", "other_held": False, "limit": 100}
    # In one transaction: what is due at this moment is due.
    with psycopg.connect(place.dsn) as connection:
        names = {}
        for name, row in rows.items():
            ((seq,),) = connection.execute(
                "INSERT INTO inbox (message_id, source, topic, key, state, next_attempt_at, partition, "
                '"offset", event_type, headers, sent_at) '
                "VALUES (gen_random_uuid(), %s, %s, %s, %s, %s, 0, 0, 'x', '[]', now()) RETURNING seq",
                row,
            ).fetchall()
            names[seq] = name

        def heads(*, block: bool = False, **types: object) -> list[str]:
            given = {"source": "billing", "block": block, **all_types, **types}
            return [names[seq] for seq, *_ in connection.execute(queries.HEADS.encode(), given)]

        def behind(name: str) -> list[str]:
            (at,) = (seq for seq, its in names.items() if its == name)
            return [names[seq] for seq, *_ in connection.execute(queries.NEXT.encode(), {"seq": at})]

        every = ["first", "another topic", "behind it", "last"]
        assert heads() == every
        assert heads(block=True) == ["first", "another topic", "last"]
        # The handler of their type, or that of all types without one, is left alone.
        assert heads(held="{x}") == []
        assert heads(named="{x}", other_held=True) == every
        assert heads(named="{y}", other_held=True) == []
        assert behind("done") == ["first"]
        assert behind("dead") == ["behind it"]
        assert behind("discarded") == ["last"]
        assert behind("not due") == []


@pytest.mark.extended
def test_receiver_and_drain_at_once(place: Place) -> None:
    place.load(500)
    with at_work(place.consumer(), "receive"), at_work(place.consumer(), "drain"):
        wait_until(lambda: place.effects() == 500, seconds=60, what="all effects")
        place.load(100, first=500)
        wait_until(lambda: place.effects() == 600, what="the new ones")
    for (numbers,) in place.rows("SELECT array_agg(n ORDER BY seq) FROM effects GROUP BY key"):
        assert numbers == sorted(numbers)


def test_a_poisoned_key_costs_the_others_nothing(place: Place) -> None:
    """Guards against a look at every message behind the poisoned one, for each of the others."""
    place.load(400, keys=1)
    place.load(100, first=400, keys=10)
    with at_work(place.consumer(), "receive") as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        run.end()
    seen: list[int] = []

    def handler(event: Event, connection: Connection) -> None:
        seen.append(event.payload["n"])
        if event.payload["n"] == 0:
            raise ValueError("poison")
        effect(event, connection)

    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed")(handler)
    assert consumer.drain(until_empty=True) == Counts(handled=90, failures=1)
    assert len(seen) == 91


def _inbox(place: Place) -> Inbox:
    """One connection's, with attempts that are due at once."""
    return Inbox(
        Connections(lambda: psycopg.connect(place.dsn, autocommit=True)),
        "billing",
        blocks=False,
        retry_seconds=0,
    )


def _claimed(place: Place) -> tuple[Inbox, Waiting]:
    """A message whose last attempt goes on, and is due again."""
    received(place, 1)
    ours = _inbox(place)
    [head] = drive(ours.heads())
    assert drive(ours.claim(head)) is not None
    return ours, Waiting(head.seq, 1, head.event_type)


@pytest.mark.extended
def test_an_event_being_handled_is_no_dead_letter_of_another_process(place: Place) -> None:
    """Guards against a dead letter, and a wait, where a handler takes longer than the backoff."""
    ours, due = _claimed(place)
    theirs = _inbox(place)

    async def handled() -> None:
        async with ours._database.transaction() as transaction:
            assert await ours.finish(transaction, due.seq, 1)
            assert await theirs.read(due) is None
            await theirs.missed(due.seq, 1, "cut off", dead=True)
            await ours._database.rows(transaction, queries.END_HANDLING, {})

    drive(handled())
    assert place.inbox() == {"processed": 1}


@pytest.mark.extended
def test_a_late_attempt_of_a_dead_letter_counts(place: Place) -> None:
    """Guards against a dead letter of an event whose last attempt was only slow."""
    ours, due = _claimed(place)
    theirs = _inbox(place)
    assert drive(theirs.read(due)) is not None
    drive(theirs.missed(due.seq, 1, "cut off", dead=True))
    assert place.inbox() == {"failed": 1}

    async def handled() -> bool:
        async with ours._database.transaction() as transaction:
            is_ours = bool(await ours.finish(transaction, due.seq, 1))
            await ours._database.rows(transaction, queries.END_HANDLING, {})
        return is_ours

    assert drive(handled())
    assert place.inbox() == {"processed": 1}


@pytest.mark.extended
@pytest.mark.parametrize("state", ["waiting", "discarded"])
def test_what_an_operator_did_is_not_undone_by_a_late_failure(place: Place, state: str) -> None:
    """Guards against a replay that is dead again without an attempt."""
    ours, due = _claimed(place)
    drive(ours.missed(due.seq, 1, "no such customer", dead=True))
    place.rows("UPDATE inbox SET state = %s, attempts = 0", state)
    drive(_inbox(place).missed(due.seq, 1, "cut off", dead=True))
    assert place.inbox() == {state: 1}
    assert drive(_inbox(place).read(due)) is None


def test_a_failure_that_is_recorded_twice_counts_once(place: Place) -> None:
    """Guards against attempts that are taken back twice, where the first answer was lost."""
    ours, due = _claimed(place)
    for _ in range(2):
        drive(ours.missed(due.seq, 1, "the service", dead=False, pause=30))
    assert place.rows("SELECT state, attempts FROM inbox") == [("waiting", 0)]


def test_texts_of_an_array_come_back_as_they_are(place: Place) -> None:
    """Guards against a key that ends its text, or counts as NULL."""
    texts = ["", "NULL", "a,b", "{a}", 'a"b', "a\\", '\\"', " a ", "größer", "a\tb", "'; --"]
    assert place.value("SELECT %s::text[]", array(texts)) == texts
    assert [place.value("SELECT cardinality(%s::text[])", array(each)) for each in ([], [""])] == [0, 1]
