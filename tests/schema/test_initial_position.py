"""Where the first relay begins."""

from __future__ import annotations

from outbox_pipelines.database import schema
from tests.schema.events import insert, one
from tests.schema.servers import Database

UNCOVERED = """
SELECT count(*) FROM outbox o, outbox_shards s
WHERE NOT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)"""


def test_a_transaction_older_than_the_schema_is_not_passed_over(empty: Database) -> None:
    """Guards against a position at the newest transaction id: an older transaction that writes later would be
    lost."""
    with empty.connect(autocommit=False) as older, empty.connect() as younger:
        one(older, "SELECT pg_current_xact_id()")
        # Ended before the migration, this one moves the snapshot's end past the older one.
        one(younger, "SELECT pg_current_xact_id()")
        schema.migrate(empty.settings)
        insert(younger)
        insert(older)
        older.commit()
    assert empty.value(UNCOVERED) == 2


def test_it_is_that_of_this_database(empty: Database) -> None:
    """Guards against a position without the identity of the database whose transactions it counts."""
    schema.migrate(empty.settings)
    [identity] = empty.rows(
        "SELECT c.system_identifier, d.oid FROM pg_control_system() c, pg_database d "
        "WHERE d.datname = current_database()"
    )
    assert empty.rows(
        "SELECT shard, owner, epoch, target, last_seq, system_identifier, database FROM outbox_shards"
    ) == [(0, None, 0, None, None, *identity)]


def test_migrating_again_does_not_move_it(database: Database) -> None:
    """Guards against a position that each deployment sets again: what is not published yet would be lost."""
    with database.connect() as connection:
        insert(connection)
    before = database.rows("SELECT * FROM outbox_shards")
    schema.migrate(database.settings)
    assert database.rows("SELECT * FROM outbox_shards") == before
    assert database.value(UNCOVERED) == 1
