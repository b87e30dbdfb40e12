"""The writers: true to their books, and wild enough that a relay may go wrong."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.conftest import Outbox, wait_until
from tests.history import business
from tests.history.writers import Writers

# An account's next event, from a transaction with a lower id: a cut at an id may fall between them.
_LOWER_ID_SECOND = """
SELECT count(*) FROM outbox one JOIN outbox next USING (aggregate_type, aggregate_id)
WHERE (next.payload ->> 'n')::int = (one.payload ->> 'n')::int + 1 AND next.tx < one.tx"""
# Numbers that were drawn and given back.
_GAPS = "SELECT coalesce(max(seq), 0) - count(*) FROM outbox"
_BOOKS = """
SELECT (SELECT sum(n) FROM account), (SELECT count(*) FROM entry), (SELECT count(*) FROM outbox)"""


def test_writers_keep_their_books_and_are_not_tame(shop: Outbox, seed: int) -> None:
    """Guards against a truth that is none, and writers who do nothing that could undo a relay."""
    writers = Writers(shop.settings.dsn, seed, 6)
    with shop.connect() as connection:

        def found(query: str) -> int:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return int(row[0])

        wait_until(lambda: found(_LOWER_ID_SECOND) > 0, what="a lower id that commits second")
        wait_until(lambda: found(_GAPS) > 10, what="rollbacks")
        writers.stop()
        counted, entries, events = connection.execute(_BOOKS).fetchone() or (0, 0, 0)
        committed = business.committed(connection)
    assert counted == entries == events == len(committed) > 0
    for _, of_account in groupby(committed, key=lambda event: (event.kind, event.account)):
        numbers = [event.n for event in of_account]
        assert numbers == list(range(1, len(numbers) + 1))


def test_a_writer_ends_what_a_killed_one_has_prepared(shop: Outbox) -> None:
    """Guards against accounts that stay locked for the rest of a run, and late commits that never come."""
    with shop.connect(autocommit=False) as killed:
        if killed.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
            pytest.skip("this server prepares no transactions")
        business.count(killed, "order", 1)
        name = f"{killed.info.dbname} 1 0"
        killed.execute(f"PREPARE TRANSACTION '{name}'".encode())
    with shop.connect() as connection:
        assert business.committed(connection) == []
        writers = Writers(shop.settings.dsn, 1, 1, two_phases=True)
        wait_until(
            lambda: any(e[:3] == ("order", "1", 1) for e in business.committed(connection)), what="its commit"
        )
        writers.stop()
        assert connection.execute("SELECT FROM pg_prepared_xacts WHERE gid = %s", [name]).fetchone() is None
