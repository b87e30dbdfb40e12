"""What is measured is true: each number is produced by the means by which it comes about."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality import outbox_measurements, quality_sql
from outbox_pipelines.quality.measurements import CAP, Measurements
from outbox_pipelines.quality.rules import Status, judge
from outbox_pipelines.relay.lease.shard import Shard
from tests.conftest import wait_until
from tests.days.archive.days import days_ago, make_days, publish, write
from tests.schema.servers import Database

BEGIN = """SELECT outbox_replay_begin('{"where": "true"}', '{topic}', '[]', 20, 7, 'a test', 'ada')"""


def _fill(database: Database, events: int) -> None:
    database.rows(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'order', (i %% 100)::text, 'order.placed', '{}' FROM generate_series(1, %s) i",
        events,
    )


def _park(database: Database, aggregate: str, *states: str, error: str | None = None) -> None:
    """An aggregate's parked events, in order."""
    for status in states:
        database.rows(
            "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
            "created_at, state, last_error, failed_at) "
            "SELECT outbox_uuidv7(), nextval('outbox_seq'), '3', 'order', %s, 'order.placed', '{}', now(), "
            "%s, %s, CASE WHEN %s THEN now() END",
            aggregate,
            status,
            None if status == "waiting" else error,
            status == "failed",
        )


def _measured(database: Database) -> Measurements:
    return outbox_measurements.read(database.settings)


def _wrong(database: Database) -> dict[str, Status]:
    return {
        result.rule.name: result.status
        for result in judge(database.settings, _measured(database))
        if result.status
    }


def test_a_new_outbox(database: Database) -> None:
    since_migrated = "extract(epoch FROM clock_timestamp() - min(applied_at))::float8 FROM outbox_migrations"
    least = database.value(f"SELECT {since_migrated}")
    found = _measured(database)
    (shard,) = found.shards
    assert (found.unpublished, found.oldest_unpublished_seconds, found.events_per_second) == (0, 0.0, 0.0)
    assert (found.parked, found.blocked_aggregates, found.dead_letters) == (0, 0, 0)
    assert found.partitions_ahead == 14
    assert found.table_bytes > 0
    assert (shard.owner, shard.heartbeat_seconds, shard.latency_seconds) == (None, None, None)
    # No relay ever ran: since the tables were made.
    assert least <= found.unowned_seconds <= database.value(f"SELECT {since_migrated}")
    assert found.oldest_transaction is None


def test_one_round_trip(database: Database) -> None:
    """Guards against a status that costs a statement for each of its numbers."""
    seen: list[str] = []
    execute = psycopg.Cursor.execute

    def counted(self: psycopg.Cursor[object], query: Any, *rest: Any, **more: Any) -> object:
        seen.append(str(query))
        return execute(self, query, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", counted)
        _measured(database)
    assert len([query for query in seen if "SET " not in query]) == 1


@pytest.mark.extended
def test_what_is_published_is_not_read(database: Database) -> None:
    """Guards against a status that takes longer the larger the table is. All rows are of one transaction, so
    that the planner believes that every id has as many."""
    _fill(database, 200_000)
    publish(database)
    database.rows("ANALYZE outbox")
    given = {
        "cap": CAP,
        "lock": "",
        "waiting": "",
        "fleet": "",
        "setup_lock": "",
        "archives": False,
        "drops_unarchived": False,
        "retention": 30,
    }
    with database.connect() as connection:
        # A published event is visible in the position: what a scan removes by that it has read in vain.
        plan = connection.execute(f"EXPLAIN {quality_sql.MEASURE}".encode(), given).fetchall()
    scans = [line for (line,) in plan if f" on outbox_{datetime.now(UTC):%Y%m%d} " in line]
    assert scans
    assert all("_tx_seq_" in line for line in scans), scans


def test_a_backlog_is_read_up_to_the_cap(database: Database) -> None:
    """Guards against a status that takes longer the more events wait, when it is most needed."""
    for _ in range(10):
        _fill(database, 1_000)
    database.rows("ANALYZE outbox")
    given = {
        **{"cap": 500, "retention": 30, "archives": False, "drops_unarchived": False},
        **{"lock": "", "waiting": "", "fleet": "", "setup_lock": ""},
    }
    with database.connect() as connection:
        connection.execute(outbox_measurements.TUNE)
        explain = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {quality_sql.MEASURE}".encode()
        (((document,),),) = connection.execute(explain, given).fetchall()
    nodes, read = [document["Plan"]], 0
    for node in nodes:
        nodes += node.get("Plans", [])
        if node.get("Relation Name") == f"outbox_{datetime.now(UTC):%Y%m%d}":
            read += node["Actual Rows"] * node["Actual Loops"]
    assert 500 <= read <= 2 * 500


def test_backlog_and_its_age_of_all_shards(database: Database) -> None:
    """Guards against events that are counted twice, or by no shard."""
    database.rows("UPDATE outbox_shards SET shards = 2")
    database.rows(
        "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
        "SELECT 1, 2, done, system_identifier, database FROM outbox_shards"
    )
    _fill(database, 1000)
    found = _measured(database)
    first, second = (shard.backlog for shard in found.shards)
    assert (first > 300, second > 300, first + second) == (True, True, 1000)
    assert found.unpublished == 1000
    assert 0 < found.oldest_unpublished_seconds < 60


def test_the_backlog_of_transactions_that_were_late(database: Database) -> None:
    """Guards against a count that leaves out what was in flight when the position moved past it."""
    with database.connect(autocommit=False) as late:
        late.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "VALUES ('order', '1', 'order.placed', '{}')"
        )
        # Something ends after it has begun: only then does the position move past it.
        _fill(database, 2)
        publish(database)
        _fill(database, 3)
        assert _measured(database).unpublished == 3
        late.commit()
    assert _measured(database).unpublished == 4


@pytest.mark.extended
def test_counts_end_at_the_cap(database: Database) -> None:
    _fill(database, CAP + 500)
    found = _measured(database)
    assert found.unpublished == found.shards[0].backlog == CAP
    assert _wrong(database)["backlog"] is Status.WARN


def test_the_owner_of_a_shard(database: Database) -> None:
    # The template's copy is another database than the position's.
    database.rows(
        "UPDATE outbox_shards SET database = d.oid FROM pg_database d WHERE datname = current_database()"
    )
    with ExitStack() as places:
        shard = Shard(database.settings, 0, "somebody")
        places.callback(shard.close)
        assert shard.try_take()
        (held,) = _measured(database).shards
        assert (held.owner, held.unowned_seconds) == ("somebody", 0.0)
        assert held.owned_seconds is not None
        database.rows("UPDATE outbox_shards SET breaker = 'open', breaker_reason = 'no answer'")
        assert _measured(database).shards_without_kafka == 1
        assert _wrong(database) == {"kafka": Status.ERROR}
    # What a relay saw that is gone says nothing.
    assert _measured(database).shards_without_kafka == 0
    database.rows("UPDATE outbox_shards SET heartbeat = now() - interval '20 seconds'")
    assert 20 <= _measured(database).unowned_seconds < 60
    assert _wrong(database) == {"shards_relayed": Status.WARN}


def test_parked_and_dead(database: Database) -> None:
    _park(database, "1", "retrying", "waiting", "waiting", error="too large")
    _park(database, "2", "retrying", error="too large")
    _park(database, "3", "failed", error="no such topic")
    _park(database, "4", "discarded", error="no such topic")
    found = _measured(database)
    assert (found.parked, found.blocked_aggregates, found.parked_reasons) == (4, 2, {"too large": 2})
    assert (found.dead_letters, found.new_dead_letters) == (1, 1)
    assert found.dead_letter_reasons == {"no such topic": 1}
    database.rows("UPDATE outbox_parked SET failed_at = now() - interval '2 hours' WHERE state = 'failed'")
    assert (_measured(database).dead_letters, _measured(database).new_dead_letters) == (1, 0)
    results = {result.rule.name: result for result in judge(database.settings, found)}
    assert results["dead_letters"].text == "1 dead letter (1 × no such topic)"
    assert results["blocked_aggregates"].status is Status.WARN


def test_delayed_and_overdue(database: Database) -> None:
    """Guards against delayed events that nothing moves, without an alert."""
    emit = "SELECT outbox_emit('order', %s, 'e', '{}', deliver_after => now() + interval '1 hour')"
    database.rows(emit, "1")
    found = _measured(database)
    assert (found.delayed, found.delayed_overdue, found.delayed_overdue_seconds) == (1, 0, 0.0)
    assert found.delayed_next_due_seconds is not None
    assert 3500 < found.delayed_next_due_seconds <= 3600
    assert found.oldest_unpublished_seconds == 0
    assert "\ndelayed       1, next due in 60 min" in database.outbox("status").output
    database.rows(emit, "2")
    database.rows("UPDATE outbox_delayed SET due = now() - interval '61 seconds' WHERE aggregate_id = '2'")
    found = _measured(database)
    assert (found.delayed, found.delayed_overdue) == (2, 1)
    assert 61 <= found.delayed_overdue_seconds < 300
    assert found.oldest_unpublished_seconds >= 61
    assert (_wrong(database)["delayed"], _wrong(database)["lag"]) == (Status.WARN, Status.ERROR)
    # One that the table refuses is no lag of the others.
    database.rows("UPDATE outbox_delayed SET last_error = 'refused', retry_at = now()")
    assert _measured(database).delayed_reasons == {"refused": 1}
    assert "lag" not in _wrong(database)
    assert "delayed: oldest overdue delayed event: " in database.outbox("status").output


def test_open_replays(database: Database) -> None:
    """Guards against a replay that was killed, or stopped, and that is forgotten."""
    for _ in range(3):
        database.rows(BEGIN)
    first, second, third = [
        row[0] for row in database.rows("SELECT id::text FROM outbox_replays ORDER BY started_at")
    ]
    advance = "SELECT outbox_replay_advance(%s, 3, 10, %s, %s)"
    database.rows(advance, first, "done", None)
    database.rows(advance, third, "stopped", "no such topic")
    found = _measured(database)
    assert [(each.id, each.state, each.sent) for each in found.replays] == [
        *((second, "running", 0), (third, "stopped", 10))
    ]
    assert "replays" not in _wrong(database)
    shown = database.outbox("status").output
    assert f"\nreplay        {second}  running  0 of 20 sent to {{topic}}  by ada: a test\n" in shown
    assert (
        f"\nreplay        {third}  stopped  10 of 20 sent to {{topic}}  by ada: a test  (no such topic)\n"
        in shown
    )
    database.rows("UPDATE outbox_replays SET progress_at = now() - interval '61 seconds'")
    assert [each.silent_seconds >= 61 for each in _measured(database).replays] == [True, False]
    assert _wrong(database)["replays"] is Status.WARN
    assert "WARN          replays: a replay has stood still for 61." in database.outbox("status").output


def test_an_old_transaction_is_named(database: Database) -> None:
    """Guards against the age of a transaction without its session; prepared ones have no session."""
    with database.connect(autocommit=False) as open_one:
        open_one.execute("SELECT 1")
        ((pid,),) = open_one.execute("SELECT pg_backend_pid()")
        found = _measured(database)
        assert found.oldest_transaction is not None
        assert found.oldest_transaction.startswith(f"session {pid} of postgres")
        assert found.oldest_transaction_seconds > 0
    assert _measured(database).oldest_transaction is None
    limits = database.settings.model_copy(update={"error_at": "old_transactions=0.001"})
    with database.connect(autocommit=False) as open_one:
        open_one.execute("SELECT 1")
        (result,) = [
            v for v in judge(limits, outbox_measurements.read(limits)) if v.rule.name == "old_transactions"
        ]
        assert result.status is Status.ERROR


def test_days_that_are_late(database: Database) -> None:
    make_days(database, days_ago(3))
    write(database, days_ago(3))
    publish(database)
    assert _measured(database).days_late.to_close == 2
    assert _wrong(database)["days_closed"] is Status.ERROR


def test_keys_are_counted_by_the_server(database: Database) -> None:
    database.rows(
        "INSERT INTO outbox_keys (key, event_id) SELECT outbox_key(i::text), outbox_uuidv7() "
        "FROM generate_series(1, 500) i"
    )

    def are_counted() -> bool:
        # The session that has inserted them may report its rows after the first ANALYZE, which counts twice.
        database.rows("ANALYZE outbox_keys")
        return _measured(database).idempotency_keys == 500

    wait_until(are_counted, what="the statistics")
    assert _measured(database).idempotency_keys_bytes > 20_000


def test_the_command_says_it_and_exits_by_it(database: Database) -> None:
    """Guards against monitoring that relies on the exit code and gets a success for a failure."""
    database.rows("UPDATE outbox_shards SET heartbeat = now()")
    done = database.outbox("status", "--check")
    assert done.exit_code == 0, done.output
    assert "checks        all passed" in done.output
    _park(database, "1", "failed", error="too large")
    assert database.outbox("status").exit_code == 0
    done = database.outbox("status", "--check")
    assert done.exit_code == 1
    assert "ERROR         dead_letters: 1 dead letter (1 × too large)" in done.output
    assert "→ Run `outbox dead-letters list`" in done.output
    reported = json.loads(database.outbox("status", "--json").output)
    assert {"check": "dead_letters", "status": "error"}.items() <= reported["checks"][3].items()
    assert database.outbox("status", "--check", OUTBOX_ERROR_AT="dead_letters=2").exit_code == 0


def test_no_outbox_is_said(database: Database) -> None:
    with pytest.raises(SetupError, match="run `outbox migrate`"):
        outbox_measurements.read(database.settings.model_copy(update={"db_schema": "elsewhere"}))


def test_a_role_that_may_relay_may_measure(database: Database) -> None:
    """Guards against a health sensor that needs a superuser."""
    role = database.role()
    database.rows(f"SELECT outbox_grant_relay('{role}')")
    settings = database.settings.model_copy(
        update={"dsn": psycopg.conninfo.make_conninfo(database.dsn, user=role)}
    )
    assert outbox_measurements.read(settings).partitions_ahead == 14
