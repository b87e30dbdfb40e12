"""The traps of relays that claim rows and mark them: each was seen to lose, reorder or hold something up."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import existing_sql, table_measurements
from outbox_pipelines.existing.claim_sessions import MarkedTableSource
from outbox_pipelines.existing.core.claims import Claim
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.existing.table_statements import array
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.read import contents
from tests.conftest import wait_until
from tests.existing import textbook
from tests.existing.conftest import Make
from tests.existing.test_shapes import PARTITIONED
from tests.existing.textbook import Table, holding


def _seqs(claim: Claim | None) -> list[int]:
    return [] if claim is None else [event.seq for event in claim.batch.events]


def test_a_row_that_commits_late_with_a_low_number_is_not_marked(table: Table) -> None:
    """Guards against settling by range: such a row was stamped and lost permanently."""
    with holding(table) as (_, source), table.connect(autocommit=False) as late:
        early = textbook.insert(late, "a", {"n": 1})
        seqs = table.write(("b", {"n": 2}), ("c", {"n": 3}))
        claim = source.claim([])
        assert claim is not None
        assert _seqs(claim) == seqs
        late.commit()
        source.settle(claim, claim.batch.events)
        assert table.pending() == [early]
        assert _seqs(source.claim([])) == [early]


@pytest.mark.parametrize("batch_events", [1, 5])
def test_a_session_that_waits_for_the_table_gets_it(table: Table, batch_events: int) -> None:
    """Guards against a deadlock that PostgreSQL does not see, in which writers wait, too.

    An ALTER TABLE waits for a claim, and the thread that would settle the claim waits behind the ALTER TABLE.
    """
    seqs = table.write(("a", {"n": 1}), ("b", {"n": 2}))
    with holding(table, batch_events=batch_events) as (_, source), table.connect() as other:
        claim = source.claim([])
        assert claim is not None
        other.execute("SET lock_timeout = '15s'")
        alter = threading.Thread(target=other.execute, args=["ALTER TABLE events ADD COLUMN more int"])
        alter.start()
        with table.connect() as looking:
            waiting = (
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'events'::regclass "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            wait_until(lambda: looking.execute(waiting).fetchone() == (1,), what="the ALTER TABLE")
        assert source.claim([]) is None
        assert source.was_locked_out
        assert alter.is_alive()
        source.settle(claim, claim.batch.events)
        alter.join(600)
        assert _seqs(source.claim([])) == seqs[batch_events:]
    assert table.rows("seq, more IS NULL") == [(seq, True) for seq in seqs]


def test_what_was_not_acknowledged_is_pending_again(table: Table) -> None:
    """Guards against a claim that is marked as a whole."""
    with holding(table) as (_, source):
        seqs = table.write(("a", {"n": 1}), ("b", {"n": 2}), ("c", {"n": 3}))
        claim = source.claim([])
        assert claim is not None
        source.settle(claim, claim.batch.events[1:2])
        assert table.pending() == [seqs[0], seqs[2]]


def test_a_row_is_marked_with_the_time_when_it_was_published(table: Table) -> None:
    """Guards against now(), which is the time of the claim."""
    with holding(table) as (_, source), table.connect() as connection:
        table.write(("a", {"n": 1}))
        claim = source.claim([])
        assert claim is not None
        row = connection.execute("SELECT clock_timestamp()").fetchone()
        source.settle(claim, claim.batch.events)
        assert connection.execute("SELECT published_at > %s FROM events", row).fetchone() == (True,)


def test_claims_do_not_overlap(table: Table) -> None:
    """Guards against rows that are sent by two claims, with their locks or without them."""
    table.fill(30)
    with holding(table, batch_events=10, breaker_seconds=0.5) as (_, source):
        claims = [source.claim([]), source.claim([])]

        def are_let_go() -> bool:
            source.let_go()
            return not any(claim.is_locked for claim in claims if claim)

        wait_until(are_let_go)
        claims.append(source.claim([]))
        assert not source.may_claim
        numbers = [seq for claim in claims for seq in _seqs(claim)]
        assert len(numbers) == len(set(numbers)) == 30
        for claim in claims:
            assert claim is not None
            source.settle(claim, claim.batch.events)
    assert table.pending() == []


def test_a_successor_waits_until_no_claim_of_its_predecessor_is_left(table: Table) -> None:
    """Guards against a takeover that skips rows still locked, and publishes later ones of the same aggregate
    first: the session that owns the table can end alone."""
    seqs = table.write(("a", {"n": 1}), ("a", {"n": 2}))
    with holding(table) as (first, source), table.connect() as connection:
        claim = source.claim([])
        assert claim is not None
        table.write(("a", {"n": 3}))
        connection.execute("SELECT pg_terminate_backend(%s)", [first.pid])
        second = TableOwnership(table.settings, "second")
        try:
            wait_until(lambda: second.try_take() or second._has_lock, what="the lock")
            assert not second.try_take()
            with pytest.raises(ShardLostError, match="session that owned"):
                source.claim([])
            source.settle(claim, claim.batch.events[:1])
            assert second.try_take()
            successor = MarkedTableSource(table.settings, second)
            assert _seqs(successor.claim([])) == [seqs[1], seqs[1] + 1]
            successor.sessions.close()
        finally:
            second.close()


def test_a_row_that_another_session_has_locked_is_not_overtaken(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against SKIP LOCKED alone: an open transaction of the old publisher would reorder."""
    seqs = table.write(("a", {"n": 1}), ("b", {"n": 2}), ("a", {"n": 3}), ("c", {"n": 4}))
    with holding(table) as (_, source), table.connect(autocommit=False) as other:
        other.execute("SELECT FROM events WHERE seq = %s FOR UPDATE", seqs[:1])
        claim = source.claim([])
        assert _seqs(claim) == [seqs[1], seqs[3]]
        assert "whether the old publisher is still running" in caplog.text
        other.rollback()
        assert _seqs(source.claim([])) == [seqs[0], seqs[2]]


def test_a_sign_of_life_just_when_a_claim_meets_a_foreign_lock(table: Table) -> None:
    """Guards against a relay that ends because two threads share a connection in the wrong moment."""
    (seq,) = table.write(("a", {"n": 1}))
    with holding(table) as (_, source), table.connect(autocommit=False) as other:
        other.execute("SELECT FROM events WHERE seq = %s FOR UPDATE", [seq])
        connection = source.sessions.free[0]
        connection.execute("BEGIN")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("SELECT FROM events FOR UPDATE NOWAIT")
        source.sessions.beat()
        connection.execute("ROLLBACK")
        assert source.claim([]) is None
        other.rollback()
        assert _seqs(source.claim([])) == [seq]


def test_a_foreign_key_to_the_table_holds_nothing_up(table: Table) -> None:
    """Guards against claims that wait for a session that writes a row that refers to an event."""
    with table.connect() as connection:
        connection.execute("CREATE UNIQUE INDEX ON events (seq)")
        connection.execute("CREATE TABLE log (event bigint REFERENCES events (seq))")
    seqs = table.write(("a", {"n": 1}))
    with holding(table) as (_, source), table.connect(autocommit=False) as other:
        other.execute("INSERT INTO log VALUES (%s)", seqs)
        assert _seqs(source.claim([])) == seqs


def test_a_partition_detached_under_a_claim_is_noticed(
    make_table: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an UPDATE that touches no row, in silence."""
    table = make_table(PARTITIONED, textbook.PUBLISHED_AT_MAPPING)
    table.fill(4)
    with table.connect() as connection:
        connection.execute("UPDATE events SET created_at = '2019-01-01' WHERE seq > 2")
        with holding(table) as (_, source), table.connect() as detaching:
            claim = source.claim([])
            assert claim is not None
            detach = threading.Thread(
                target=lambda: detaching.execute(
                    "ALTER TABLE events DETACH PARTITION events_past CONCURRENTLY"
                )
            )
            detach.start()
            pending = b"SELECT FROM pg_inherits WHERE inhdetachpending"
            wait_until(lambda: connection.execute(pending).fetchone() is not None)
            source.settle(claim, claim.batch.events)
            detach.join()
        assert "2 published events are no longer in public.events" in caplog.text
        assert table.rows() == [(1, True), (2, True)]


def test_a_table_that_cannot_be_marked_stops_the_relay(table: Table) -> None:
    """Guards against a trigger that makes the relay publish the same rows again and again."""
    table.write(("a", {"n": 1}))
    with table.connect() as connection:
        connection.execute(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
            "CREATE TRIGGER keep BEFORE UPDATE ON events FOR EACH ROW EXECUTE FUNCTION keep()"
        )
    with pytest.raises(SetupError, match="does not allow 1 of 1 rows to be marked, so nothing is published"):
        table.drain()


def test_numbers_that_are_not_unique_stop_the_relay(table: Table) -> None:
    """Guards against a row that is marked because another one of its number was published."""
    with table.connect() as connection:
        connection.execute("DROP INDEX events_seq_idx")
        with holding(table) as (_, source):
            (seq,) = table.write(("a", {"n": 1}))
            claim = source.claim([])
            assert claim is not None
            connection.execute(
                "INSERT INTO events (seq, aggregate_type, aggregate_id, event_type, payload) "
                "OVERRIDING SYSTEM VALUE VALUES (%s, 'order', 'b', 'order.placed', '2')",
                [seq],
            )
            with pytest.raises(SetupError, match="'seq' is not unique"):
                source.settle(claim, claim.batch.events)
    assert table.pending() == [seq, seq]


@pytest.mark.extended
def test_of_two_relays_one_is_active(table: Table) -> None:
    """Guards against two that claim side by side: 39 reorderings in 12 s."""
    with table.relayed():
        held = table_measurements.read(table.settings).shards[0].owner
        assert held is not None
        with pytest.raises(service.ShardOwnedError, match=r"events is owned by .* since .* UTC"):
            service.relay(table.settings, until_empty=True, standby=service.Standby.REFUSE)
        standby = TableOwnership(table.settings, "standby")
        assert not standby.try_take()
        assert standby.try_wait()
    assert standby.try_take()
    standby.close()


def test_a_relay_past_its_time_hands_over(table: Table) -> None:
    """Guards against a session that ends before its successor is there, or never."""
    table.fill(100)
    successor = TableOwnership(table.settings, "successor")
    relay = threading.Thread(target=lambda: service.relay(table.settings, hand_over_after=0.1))
    relay.start()
    wait_until(lambda: not table.pending())
    assert not successor.try_take()
    assert successor.try_wait()
    wait_until(successor.try_take, what="the handover")
    relay.join(600)
    assert not relay.is_alive()
    successor.close()


def test_a_pooler_in_transaction_mode_is_refused(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an advisory lock that belongs to a pooler's session: two relays would hold it."""
    with table.connect() as pooled:
        monkeypatch.setattr("outbox_pipelines.relay.lease.owner_session.connect", lambda *_, **__: pooled)
        monkeypatch.setattr("outbox_pipelines.database.connect", lambda *_, **__: nullcontext(pooled))
        with pytest.raises(SetupError, match="through a pooler in transaction mode"):
            TableOwnership(table.settings, "test")


@pytest.mark.extended
@pytest.mark.parametrize("is_analyzed", [False, True])
def test_a_claim_goes_by_the_index(table: Table, is_analyzed: bool) -> None:
    """Guards against plans that sort the whole backlog for each claim."""
    with table.connect() as connection:
        connection.execute("ALTER TABLE events SET (autovacuum_enabled = off)")
        if is_analyzed:
            table.fill(50_000)
            connection.execute("UPDATE events SET published_at = now()")
            connection.execute("ANALYZE events")
    table.fill(50_000)
    with holding(table) as (ownership, source):
        claim = source.claim([])
        assert claim is not None
        parameters = {
            "limit": 5000,
            "busy": array(_seqs(claim)),
            "types": ["order"],
            "ids": ["1"],
            "most": contents.FEW,
        }
        query = ownership.statements(existing_sql.CLAIM, existing_sql.NOT_BUSY, existing_sql.NOT_AMONG)
        connection = source.sessions.free[0]
        plan = "".join(line for (line,) in connection.execute(b"EXPLAIN " + query, parameters))
    assert "Sort" not in plan
    assert "Index Scan using events_seq_idx" in plan


def test_what_a_claim_costs(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a statement for each event."""
    statements: list[str] = []
    execute = psycopg.Cursor.execute

    def counted(self: psycopg.Cursor, query: Any, *arguments: Any, **named: Any) -> psycopg.Cursor:
        statements.append(str(query))
        return execute(self, query, *arguments, **named)

    table.fill(10_000)
    with holding(table, batch_events=1000) as (_, source):
        monkeypatch.setattr(psycopg.Cursor, "execute", counted)
        for _ in range(10):
            claim = source.claim([])
            assert claim is not None
            source.settle(claim, claim.batch.events)
        # Begin with the lock, open the portal, two fetches, mark, commit. Once: whether there is anything,
        # and whether it can be marked, in three.
        assert len(statements) == 10 * 6 + 1 + 3
    assert table.pending() == []
