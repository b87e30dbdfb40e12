"""The business whose events are relayed: accounts that count up, each locked before its event is written.

Invariants:
- The truth are the business's own tables: `account.n` counts, `entry` has one row an event, and both are
  written in the event's transaction. Nothing about the outbox or a relay is believed.
- Event n of an account carries n and a token of its own, so that no other event can pass for it, not even
  the twin that was rolled back before it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from string import ascii_letters
from typing import Any, Final

import psycopg

from outbox_pipelines.writer import emit
from tests.history.record import Committed

KINDS = ("order", "payment", "shipment")
Accounts = tuple[tuple[str, int], ...]
ACCOUNTS: Final[Accounts] = tuple((kind, account) for kind in KINDS for account in range(20))
# Of backlogs alone: a transaction of thousands of events keeps no other writer waiting.
_BULK_ACCOUNTS = range(20, 60)
# Their keys are longer than an entry of an index may be, and cannot be compressed below that.
LONG_ACCOUNTS: Final[Accounts] = tuple((kind, account) for kind in KINDS for account in range(60, 63))
LONG_KEY: Final = 3_000

# Characters of noise in an event's payload, and how often: hexadecimal, so that it compresses by half.
Sizes = Mapping[int, float]
SMALL: Final[Sizes] = {0: 1.0}
USUAL: Final[Sizes] = {1_600: 1.0}
MIXED: Final[Sizes] = {0: 0.3, 1_600: 0.68, 40_000: 0.0195, 900_000: 0.0005}
HUGE: Final[Sizes] = {900_000: 1.0}
SIZES: Final[Mapping[str, Sizes]] = {"small": SMALL, "usual": USUAL, "mixed": MIXED, "huge": HUGE}
_NOISE: Final = random.Random(0).randbytes(500_000)
# Of one statement.
_BULK_EVENTS = 2_000

_TABLES = """
CREATE TABLE account (kind text, id int, n int NOT NULL DEFAULT 0, PRIMARY KEY (kind, id));
CREATE TABLE entry (token text PRIMARY KEY, kind text NOT NULL, account int NOT NULL, n int NOT NULL,
                    UNIQUE (kind, account, n))"""
_COUNT = """
WITH counted AS (
    UPDATE account SET n = n + 1 WHERE kind = %s AND id = %s RETURNING kind, id, n
)
INSERT INTO entry SELECT gen_random_uuid()::text, kind, id, n FROM counted RETURNING n, token"""

_COMMITTED = """
SELECT kind, account::text, n, token,
       CASE WHEN current_setting('track_commit_timestamp')::bool
            THEN extract(epoch FROM pg_xact_commit_timestamp(xmin))::float END
FROM entry ORDER BY 1, 2, 3"""

_BULK = """
WITH given AS MATERIALIZED (
    SELECT g.*, gen_random_uuid()::text AS token,
           row_number() OVER (PARTITION BY kind, account ORDER BY i) AS k
    FROM unnest(%(kinds)s::text[], %(accounts)s::int[], %(sizes)s::int[]) WITH ORDINALITY
         AS g (kind, account, size, i)
), counted AS (
    UPDATE account a SET n = n + more.events
    FROM (SELECT kind, account, count(*) AS events FROM given GROUP BY 1, 2) more
    WHERE a.kind = more.kind AND a.id = more.account
    RETURNING a.kind, a.id AS account, a.n - more.events AS before
), events AS MATERIALIZED (
    SELECT token, kind, account, before + k AS n, size, i FROM given JOIN counted USING (kind, account)
), written AS (
    INSERT INTO entry SELECT token, kind, account, n FROM events
)
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT kind, account::text, kind || '.counted', jsonb_build_object(
    'n', n, 'token', token,
    'noise', encode(substr(%(noise)s, 1 + ((500000 - size / 2) * random())::int, size / 2), 'hex'))
FROM events ORDER BY i"""


def key_of(account: int) -> str:
    """The aggregate id of an account: its number, and for some accounts much more."""
    if account < LONG_ACCOUNTS[0][1]:
        return str(account)
    return f"{account} {''.join(random.Random(account).choices(ascii_letters, k=LONG_KEY - 3))}"


_NUMBERS: Final = {key_of(account): str(account) for _, account in LONG_ACCOUNTS}


def account_of(key: str) -> str:
    """The number of the account whose aggregate id this is; what is no such id comes back as it is."""
    return _NUMBERS.get(key, key)


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Makes the tables, with every account at 0."""
    connection.execute(_TABLES.encode())
    accounts = [*ACCOUNTS, *LONG_ACCOUNTS, *((kind, account) for kind in KINDS for account in _BULK_ACCOUNTS)]
    connection.cursor().executemany("INSERT INTO account (kind, id) VALUES (%s, %s)", accounts)


def committed(connection: psycopg.Connection[Any]) -> list[Committed]:
    """Every event that was committed."""
    return [Committed(*row) for row in connection.execute(_COMMITTED)]


def write_bulk(
    connection: psycopg.Connection[Any], chance: random.Random, events: int, sizes: Sizes
) -> Iterator[int]:
    """Many events of few or of many accounts, in transactions of thousands; yields their characters of noise
    after each."""
    ids = chance.sample(_BULK_ACCOUNTS, chance.choice([1, 5, len(_BULK_ACCOUNTS)]))
    while events > 0:
        some = min(events, _BULK_EVENTS)
        events -= some
        lengths = chance.choices(list(sizes), list(sizes.values()), k=some)
        kinds, accounts = chance.choices(KINDS, k=some), chance.choices(ids, k=some)
        connection.execute(_BULK, {"kinds": kinds, "accounts": accounts, "sizes": lengths, "noise": _NOISE})
        yield sum(lengths)


def count(connection: psycopg.Connection[Any], kind: str, account: int, size: int = 0) -> int:
    """One more event of an account, in the caller's transaction: locks the account first."""
    row = connection.execute(_COUNT, [kind, account]).fetchone()
    assert row is not None
    n, token = row
    noise = {"noise": _NOISE[: size // 2].hex()} if size else {}
    emit(connection, kind, key_of(account), f"{kind}.counted", {"n": n, "token": token, **noise})
    return int(n)


def transact(
    connection: psycopg.Connection[Any],
    chance: random.Random,
    name: str = "",
    sizes: Sizes = SMALL,
    accounts: Accounts = ACCOUNTS,
) -> None:
    """One transaction as applications have them: short or long, with savepoints, rolled back or committed.

    Args:
        name: what the caller's transactions are prepared under, where some are to commit in two phases.
    """
    try:
        _begin(connection, chance)
        # In one order everywhere, so that writers wait for one another but never in a circle.
        for kind, account in sorted(chance.sample(accounts, chance.choice([1, 1, 1, 3]))):
            if chance.random() < 0.1:
                with connection.transaction(force_rollback=True):
                    count(connection, kind, account)
            for _ in range(30 if chance.random() < 0.02 else 1):
                (size,) = chance.choices(list(sizes), list(sizes.values()))
                count(connection, kind, account, size)
            if chance.random() < 0.05:
                time.sleep(chance.uniform(0, 0.05))
        if chance.random() < 0.01:
            time.sleep(chance.uniform(0.5, 3))
        if chance.random() < 0.1:
            connection.rollback()
        elif name and chance.random() < 0.05:
            _prepare(connection, name)
            time.sleep(chance.uniform(0, 0.2))
            commit_prepared(connection, name)
        else:
            connection.commit()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.SerializationFailure):
        connection.rollback()


def _prepare(connection: psycopg.Connection[Any], name: str) -> None:
    try:
        connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
    except psycopg.errors.DuplicateObject:
        # The last words of a killed writer, which the server heard after `commit_prepared` had looked.
        connection.rollback()


def commit_prepared(connection: psycopg.Connection[Any], name: str) -> None:
    """Commits what is prepared under a name: by the caller, or by a writer that was killed then."""
    connection.autocommit = True
    if connection.execute("SELECT FROM pg_prepared_xacts WHERE gid = %s", [name]).fetchone() is not None:
        connection.execute(f"COMMIT PREPARED '{name}'".encode())
    connection.autocommit = False


def give_up_prepared(connection: psycopg.Connection[Any]) -> None:
    """Rolls back what killed writers have prepared in this database."""
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    for (name,) in connection.execute(query).fetchall():
        connection.execute(f"ROLLBACK PREPARED '{name}'".encode())


def _begin(connection: psycopg.Connection[Any], chance: random.Random) -> None:
    # A writer that waits long for an account stops: one late commit would otherwise stop all writers.
    connection.execute("SET LOCAL lock_timeout = '200ms'")
    if chance.random() < 0.1:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    if chance.random() < 0.2:
        # An id before the lock: the lower id then often commits second.
        connection.execute("SELECT pg_current_xact_id()")
        time.sleep(chance.uniform(0, 0.02))
