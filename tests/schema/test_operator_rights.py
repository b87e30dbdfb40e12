"""What an operator, a relay's role and an analyst may do, and what they may not (G1, G9)."""

from __future__ import annotations

import psycopg
import pytest

from outbox_pipelines.relay.parking import parking_sql
from tests.schema.events import insert, one
from tests.schema.servers import Database

REFUSED = psycopg.errors.InsufficientPrivilege
DEAD = """
INSERT INTO outbox_parked SELECT o.*, 'failed', 3, NULL, 'too large', now(), now()
FROM outbox o WHERE seq = %s"""


@pytest.fixture
def dead(database: Database) -> int:
    """The seq of a dead letter."""
    with database.connect() as connection:
        seq = insert(connection).seq
        connection.execute(DEAD.encode(), [seq])
    return seq


def _granted(database: Database, kind: str) -> str:
    role = database.role()
    database.rows(f"SELECT outbox_grant_{kind}('{role}')")
    return role


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outbox_shards SET done = pg_current_snapshot()",
        "UPDATE outbox_shards SET epoch = epoch + 1",
        "DELETE FROM outbox_shards",
        "INSERT INTO outbox_shards SELECT * FROM outbox_shards",
        "UPDATE outbox_parked SET payload = '{}'",
        "UPDATE outbox_parked SET state = 'replaying'",
        "DELETE FROM outbox_parked",
        "INSERT INTO outbox_audit (action, reason, filter, events) VALUES ('replay', 'y', '{}', '{}')",
        "DELETE FROM outbox_audit",
        "DELETE FROM outbox_released",
        "INSERT INTO outbox_progress (shard, done, events) SELECT 0, pg_current_snapshot(), 1",
        "UPDATE outbox_days SET state = 'dropped'",
        "SELECT outbox_park('{}', '{}', '{}', now(), now(), 0, 0)",
        "SELECT outbox_release('{1}')",
        "SELECT outbox_ensure_partitions(100)",
    ],
)
def test_an_operator_writes_into_no_table(database: Database, dead: int, statement: str) -> None:
    """Guards against an event that is lost and shows as PROCESSED, or is replayed as another one."""
    with database.connect(user=_granted(database, "operator")) as ours, pytest.raises(REFUSED):
        ours.execute(statement.encode())


def test_an_operator_acts_under_its_own_name(
    database: Database, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an audit that any role signs as any other."""
    role = _granted(database, "operator")
    monkeypatch.setenv("LOGNAME", "somebody-else")
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role)
    id = str(database.value("SELECT id FROM outbox"))
    done = database.outbox("dead-letters", "replay", id, "--reason", "why not", "--yes", OUTBOX_DSN=dsn)
    assert done.exit_code == 0, done.output
    ((actor, behalf, action, reason, events),) = database.rows(
        "SELECT actor, on_behalf_of, action, reason, events FROM outbox_audit"
    )
    assert (actor, action, reason, events) == (role, "replay", "why not", [dead])
    assert "somebody-else" not in behalf
    assert database.value("SELECT state FROM outbox_parked") == "replaying"


def test_an_action_is_on_dead_letters_alone(database: Database, dead: int) -> None:
    """Guards against an action on what is not one, and against one without a reason."""
    with database.connect(user=_granted(database, "operator")) as ours:
        given = {"action": "discard", "seqs": [dead], "reason": "x", "filter": "{}", "on_behalf_of": None}
        assert one_of(ours.execute(parking_sql.ACT, given)) == 1
        assert one_of(ours.execute(parking_sql.ACT, given)) == 0
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            ours.execute(parking_sql.ACT, given | {"action": "waiting"})
        database.rows("UPDATE outbox_parked SET state = 'failed'")
        with pytest.raises(psycopg.errors.CheckViolation):
            ours.execute(parking_sql.ACT, given | {"reason": ""})
    assert database.value("SELECT count(*) FROM outbox_audit") == 1


def test_an_operator_changes_the_number_of_shards(database: Database) -> None:
    """Guards against a change that is stuck because a right is missing, and one that leaves no trace."""
    with database.connect(user=_granted(database, "operator")) as ours:
        step = "SELECT step FROM outbox_change_shards(%s, %s, 'alice@desk')"
        assert one(ours, step, 2, False) == ("wait",)
        assert one(ours, step, 3, False) == ("busy",)
        # As the relay of shard 0 does.
        database.rows("UPDATE outbox_shards SET barrier_paused = true")
        assert one(ours, step, 2, True) == ("wait",)
        database.rows("UPDATE outbox_shards SET barrier_reached = true, done = barrier")
        assert one(ours, step, 2, True) == ("done",)
        assert one(ours, step, 2, False) == ("nothing",)
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            one(ours, step, 65, False)
        assert one(ours, step, 3, False) == ("wait",)
        ours.execute("SELECT outbox_keep_shards()")
    assert database.rows("SELECT shard, shards, epoch, wanted FROM outbox_shards ORDER BY 1") == [
        (0, 2, 1, None),
        (1, 2, 1, None),
    ]
    assert database.rows("SELECT action, reason, on_behalf_of FROM outbox_audit") == [
        ("shards", "from 1 to 2 shards", "alice@desk")
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outbox_parked SET payload = '{}'",
        "UPDATE outbox_parked SET id = gen_random_uuid()",
        "UPDATE outbox_parked SET headers = '{}'",
        "DELETE FROM outbox_parked",
        "INSERT INTO outbox_parked SELECT * FROM outbox_parked",
        "INSERT INTO outbox_released (seq, id, attempts) VALUES (1, gen_random_uuid(), 0)",
        "INSERT INTO outbox_shards SELECT * FROM outbox_shards",
        "DELETE FROM outbox_shards",
        "UPDATE outbox_shards SET shards = 2",
        "UPDATE outbox SET payload = '{}'",
        "DELETE FROM outbox",
        "DELETE FROM outbox_progress",
        "SELECT * FROM outbox_keys",
        "SELECT outbox_act('replay', '{1}', 'x', '{}', 'me')",
        "SELECT outbox_change_shards(2, false, 'me')",
    ],
)
def test_a_relay_changes_no_event(database: Database, dead: int, statement: str) -> None:
    """Guards against a relay's role that rewrites or deletes what is parked."""
    with database.connect(user=_granted(database, "relay")) as ours, pytest.raises(REFUSED):
        ours.execute(statement.encode())


def test_a_relay_parks_what_was_written_and_releases_no_dead_letter(database: Database, dead: int) -> None:
    """Guards against a release that removes the only copy of a dead letter."""
    written = insert(database.connect())
    with database.connect(user=_granted(database, "relay")) as ours:
        ours.execute(
            "SELECT outbox_park(%(s)s, '{retrying}', '{refused}', now() - interval '1 day', now() + interval "
            "'1 day', 0, 1000000)",
            {"s": [written.seq]},
        )
        ours.execute("UPDATE outbox_parked SET state = state, attempts = attempts + 1, trying = true")
        ours.execute("SELECT outbox_release(%s)", [[dead, written.seq]])
    found: list[tuple[int, str]] = database.rows("SELECT seq, state FROM outbox_parked")
    assert found == [(dead, "failed")]
    assert database.rows("SELECT seq, attempts FROM outbox_released") == [(written.seq, 1)]


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('o', '1', 'e', '1')",
        "SELECT outbox_emit('o', '1', 'e', '1')",
        "SELECT * FROM outbox_keys",
        "SELECT * FROM outbox_audit",
        "SELECT payload FROM outbox_parked",
        "UPDATE outbox_days SET state = 'dropped'",
        "UPDATE outbox_parked SET state = 'waiting'",
        "SELECT outbox_act('replay', '{1}', 'x', '{}', 'me')",
    ],
)
def test_an_analyst_reads_alone(database: Database, dead: int, statement: str) -> None:
    """Guards against a role for reading that writes, or sees keys."""
    with database.connect(user=_granted(database, "analyst")) as ours:
        assert one(ours, "SELECT event_data, status, last_error FROM outbox_events")[1:] == (
            "FAILED",
            "too large",
        )
        with pytest.raises(REFUSED):
            ours.execute(statement.encode())


def test_an_analyst_asks_for_an_aggregates_history(database: Database, dead: int) -> None:
    """Guards against a command for analysts that needs more than they have."""
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=_granted(database, "analyst"))
    done = database.outbox("archive", "history", "order", "42", OUTBOX_DSN=dsn)
    assert done.exit_code == 0, done.output
    assert "order.placed" in done.output


def one_of(cursor: psycopg.Cursor[tuple[int]]) -> int:
    row = cursor.fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("state", ["replaying", "discarded", "waiting", "retrying"])
def test_a_relay_ends_no_dead_letter(database: Database, dead: int, state: str) -> None:
    """Guards against a relay's role that releases dead letters as published, without a trace in the audit."""
    role = _granted(database, "relay")
    with database.connect(user=role) as relay:
        with pytest.raises(REFUSED, match="may not change a dead letter from failed"):
            relay.execute(f"UPDATE outbox_parked SET state = '{state}'".encode())
        relay.execute("SELECT outbox_release(%s)", [[dead]])
    assert database.rows("SELECT state FROM outbox_parked") == [("failed",)]
    assert database.rows("SELECT FROM outbox_released") == []


@pytest.mark.parametrize("state", ["replaying", "discarded"])
def test_a_relay_parks_nothing_as_ended(database: Database, state: str) -> None:
    """Guards against an event that is discarded by the way it is parked."""
    with database.connect() as connection:
        seq = insert(connection).seq
    role = _granted(database, "relay")
    park = "SELECT outbox_park(%s, %s, '{x}', '-infinity', 'infinity', 0, 1000000)"
    with database.connect(user=role) as relay:
        relay.execute(park.encode(), [[seq], [state]])
        assert database.rows("SELECT FROM outbox_parked") == []
        relay.execute(park.encode(), [[seq], ["retrying"]])
        with pytest.raises(REFUSED):
            relay.execute(f"UPDATE outbox_parked SET state = '{state}'".encode())
        # What a relay does: it makes a dead letter.
        relay.execute("UPDATE outbox_parked SET state = 'failed'")
    assert database.rows("SELECT state FROM outbox_parked") == [("failed",)]


def test_a_replayed_dead_letter_can_be_released(database: Database, dead: int) -> None:
    operator, relay = _granted(database, "operator"), _granted(database, "relay")
    with database.connect(user=operator) as person:
        assert one(person, "SELECT outbox_act('replay', %s, 'corrected', '{}', NULL)", [dead]) == (1,)
    with database.connect(user=relay) as session:
        session.execute("SELECT outbox_release(%s)", [[dead]])
    assert database.rows("SELECT seq FROM outbox_released") == [(dead,)]
