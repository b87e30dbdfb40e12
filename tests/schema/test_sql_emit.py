"""`outbox_emit`: the call for every language."""

from __future__ import annotations

import psycopg
import pytest

from tests.schema.events import insert, one, purge_after_claims
from tests.schema.servers import Connection

EMIT = (
    "SELECT id, seq, duplicate FROM outbox_emit('order', '42', 'order.placed', '{}', idempotency_key => %s)"
)


def test_it_returns_what_it_wrote(connection: Connection) -> None:
    """Guards against an answer that belongs to another row, or a column that ends up in another one."""
    written = one(
        connection,
        "SELECT * FROM outbox_emit('order', '42', 'order.placed', '{\"total\": 5}', '{\"h\": \"1\"}', "
        "'key', 'correlation', 'causation', 'trace', 3)",
    )
    assert written[2] is False
    assert one(
        connection,
        "SELECT id, seq, false, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key, "
        "correlation_id, causation_id, traceparent, version FROM outbox",
    ) == (
        *written,
        *("order", "42", "order.placed", {"total": 5}, {"h": "1"}),
        *("key", "correlation", "causation", "trace", 3),
    )


def test_four_arguments_are_enough(connection: Connection) -> None:
    """Guards against optional arguments that are required, or that are stored as another value than NULL."""
    drawn, seq, duplicate = one(connection, "SELECT * FROM outbox_emit('order', '42', 'e', '{}')")
    assert (drawn, seq) == one(
        connection,
        "SELECT id, seq FROM outbox WHERE 0 = "
        "num_nonnulls(headers, idempotency_key, correlation_id, causation_id, traceparent, version)",
    )
    assert duplicate is False


def test_a_known_key_inserts_nothing(connection: Connection) -> None:
    """Guards against a retried request that publishes its event twice."""
    first = one(connection, EMIT, "k")
    assert one(connection, EMIT, "k") == (first[0], None, True)
    assert one(connection, EMIT, "K")[2] is False
    assert one(connection, "SELECT count(*) FROM outbox") == (2,)


def test_a_key_of_a_plain_insert_is_known(connection: Connection) -> None:
    """Guards against two ways to write that do not know of each other's keys."""
    written = insert(connection, idempotency_key="k")
    assert one(connection, EMIT, "k") == (written.id, None, True)


@pytest.mark.parametrize("first", ["insert", "emit"])
def test_a_plain_insert_with_a_known_key_fails(connection: Connection, first: str) -> None:
    """Guards against an event that is silently missing, or is there twice."""
    if first == "insert":
        insert(connection, idempotency_key="k")
    else:
        one(connection, EMIT, "k")
    with pytest.raises(psycopg.errors.UniqueViolation, match="outbox_keys_pkey"):
        insert(connection, idempotency_key="k")


def test_repeating_the_id_does_not_excuse_a_known_key(connection: Connection) -> None:
    """Guards against an event published twice by a client that draws its ids itself and retries with both."""
    written = insert(connection, idempotency_key="k")
    with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
        insert(connection, id=written.id, idempotency_key="k")
    # As if the first transaction were one of the past, and its partition did not see the second id.
    connection.execute("UPDATE outbox_keys SET created_at = created_at - interval '1 minute'")
    with pytest.raises(psycopg.errors.UniqueViolation, match="outbox_keys_pkey"):
        insert(connection, id=written.id, idempotency_key="k")


def test_many_rows_of_one_insert_share_no_key(connection: Connection) -> None:
    """Guards against a check that sees only what earlier statements wrote."""
    with pytest.raises(psycopg.errors.UniqueViolation, match="outbox_keys_pkey"):
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, idempotency_key) "
            "VALUES ('order', '1', 'e', '{}', 'k'), ('order', '2', 'e', '{}', 'k')"
        )


def test_a_rolled_back_key_is_free_again(connection: Connection) -> None:
    """Guards against a key that outlives the event it stood for: the retry would be taken for a duplicate."""
    with connection.transaction(force_rollback=True):
        one(connection, EMIT, "k")
    assert one(connection, EMIT, "k")[2] is False


def test_a_refused_event_does_not_keep_its_key(connection: Connection) -> None:
    """Guards against a key that stays claimed after its event is refused, since the claim comes first."""
    with pytest.raises(psycopg.errors.CheckViolation), connection.transaction():
        one(connection, "SELECT outbox_emit('order', '', 'e', '{}', idempotency_key => 'k')")
    assert one(connection, EMIT, "k")[2] is False


def test_a_key_within_a_savepoint_counts_after_it(connection: Connection) -> None:
    """Guards against a claim in a subtransaction that does not count: its transaction id differs from the
    event's."""
    with connection.transaction():
        first = one(connection, EMIT, "k")
    assert one(connection, EMIT, "k") == (first[0], None, True)


@pytest.mark.parametrize("key", ["ключ", "x" * 9_900, "'; --", " "])
def test_any_text_is_a_key(connection: Connection, key: str) -> None:
    """Guards against an error for keys that are too long for an index, or in another alphabet."""
    first = one(connection, EMIT, key)
    assert one(connection, EMIT, key) == (first[0], None, True)
    assert one(connection, EMIT, key + "x")[2] is False


def test_a_key_that_is_purged_concurrently_is_free(connection: Connection) -> None:
    """Guards against a duplicate of an event without an id (`id` NULL), and the event not written."""
    insert(connection, idempotency_key="k")
    purge_after_claims(connection)
    drawn, seq, duplicate = one(connection, EMIT, "k")
    assert duplicate is False
    assert one(connection, "SELECT id FROM outbox WHERE seq = %s", seq) == (drawn,)
