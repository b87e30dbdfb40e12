"""What an event may contain: names, headers, and a payload that Kafka takes."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.noise import noise
from tests.schema.events import insert, one
from tests.schema.servers import Connection

LIMIT = 1_000_000


@pytest.mark.parametrize("column", ["aggregate_type", "aggregate_id", "event_type", "idempotency_key"])
def test_empty_names_are_refused(connection: Connection, column: str) -> None:
    """Guards against empty topics and keys; with '' as idempotency key all events but one are duplicates."""
    with pytest.raises(psycopg.errors.CheckViolation, match=f"outbox: {column} is empty"):
        insert(connection, **{column: ""})


@pytest.mark.parametrize("headers", [["a"], "a", 1, None])
def test_headers_are_an_object(connection: Connection, headers: object) -> None:
    """Guards against headers without names, on which the relay would stop."""
    with pytest.raises(psycopg.errors.CheckViolation, match="are not an object"):
        insert(connection, headers=Jsonb(headers))


def test_no_headers_and_no_fields_are_fine(connection: Connection) -> None:
    """Guards against a guard that refuses NULL or {}."""
    insert(connection, headers=None)
    insert(connection, headers=Jsonb({}))


def test_a_payload_of_the_limit_passes(connection: Connection) -> None:
    """Guards against a limit that counts PostgreSQL's own overhead."""
    insert(connection, payload=Jsonb("x" * (LIMIT - 2)))
    assert one(connection, "SELECT octet_length(payload::text) FROM outbox") == (LIMIT,)


@pytest.mark.parametrize(
    "payload",
    [
        "x" * (LIMIT - 1),
        "\x01" * (LIMIT // 6 + 1),  # \u0001, six bytes for one
        "é" * (LIMIT // 2),
        [0] * (LIMIT // 3 + 1),
        [True] * (LIMIT // 6 + 1),
    ],
    ids=["letters", "control characters", "accents", "numbers", "booleans"],
)
def test_a_larger_payload_is_refused(connection: Connection, payload: object) -> None:
    """Guards against an event that no broker accepts: only the relay would detect it and block its
    aggregate."""
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="more than 1000000") as refused:
        insert(connection, payload=Jsonb(payload))
    assert "send the reference" in (refused.value.diag.message_hint or "")


HUGE = "1e131071"  # twelve bytes stored, 131,072 as text


@pytest.mark.parametrize("numbers", [8, 1_500])
@pytest.mark.parametrize("column", ["payload", "headers"])
def test_a_short_form_of_a_long_text_is_refused(connection: Connection, column: str, numbers: int) -> None:
    """Guards against a row of some hundred bytes that takes the relay hundreds of megabytes to read."""
    content = f'{{"a": [{", ".join([HUGE] * numbers)}]}}'
    with pytest.raises(
        psycopg.errors.ProgramLimitExceeded, match=rf"{column} of order.placed ha.*, more than"
    ):
        insert(connection, **{column: content})


@pytest.mark.extended
def test_the_same_from_a_compressed_column_is_refused(connection: Connection) -> None:
    """Guards against a stored size that is meaningless, because it is that of the compressed value."""
    connection.execute("CREATE TEMP TABLE source (body jsonb)")
    connection.execute(f"INSERT INTO source SELECT jsonb_agg({HUGE}::numeric) FROM generate_series(1, 1500)")
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers) "
            "SELECT 'order', '1', 'e', '{}', jsonb_build_object('a', body) FROM source"
        )


def test_a_payload_that_is_not_measured_is_below_the_limit(connection: Connection) -> None:
    """Guards against a size from which the text is measured that lets a text above the limit through."""
    longest = f"1{'0' * 131_071}.{'0' * 16_383}"
    insert(connection, payload=f"[{', '.join([longest] * 6)}]")
    assert one(connection, "SELECT octet_length(payload::text) FROM outbox") < (LIMIT,)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        insert(connection, payload=f"[{', '.join([longest] * 7)}]")


@pytest.mark.parametrize(
    "column",
    [
        "aggregate_type",
        "aggregate_id",
        "event_type",
        "idempotency_key",
        "correlation_id",
        "causation_id",
        "traceparent",
    ],
)
def test_long_names_and_ids_are_refused(connection: Connection, column: str) -> None:
    """Guards against a column that is not measured: 270 MB of it ended every read; and against an index that
    has no room for it."""
    insert(connection, **{column: noise(10_000)})
    with pytest.raises(
        psycopg.errors.ProgramLimitExceeded, match=f"{column} has 10001 bytes, more than 10000"
    ):
        insert(connection, **{column: "x" * 10_001})


@pytest.mark.parametrize(
    "column",
    [
        "seq",
        "tx",
        "created_at",
        "payload",
        "aggregate_type",
        "aggregate_id",
        "event_type",
        "idempotency_key",
        "correlation_id",
        "causation_id",
        "traceparent",
    ],
)
def test_harmless_headers_excuse_nothing(connection: Connection, column: str) -> None:
    """Guards against a short way for rows with headers on which another column is not checked."""
    insert(connection)
    insert(connection)
    # Today's partition takes it, so that only the guard can refuse.
    clock = one(connection, "SELECT date_trunc('day', now(), 'UTC') + interval '1 millisecond'")[0]
    long = {"payload": Jsonb("x" * LIMIT), "created_at": clock, "seq": 1, "tx": "1"}.get(column, "x" * 10_001)
    with pytest.raises(
        (psycopg.errors.ProgramLimitExceeded, psycopg.errors.CheckViolation), match="outbox: "
    ):
        insert(connection, headers=Jsonb({"a": "b"}), **{column: long})


def test_long_headers_are_refused(connection: Connection) -> None:
    """Guards against uncounted headers: 600 events with 900 kB of them filled the relay's memory."""
    insert(connection, headers=Jsonb({"a": "x" * 99_990}))
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match=r"headers of .* have .* more than 100000"):
        insert(connection, headers=Jsonb({"a": "x" * 100_000}))


def test_a_payload_from_a_compressed_column_is_refused(connection: Connection) -> None:
    """Guards against a payload copied from a table: it is compressed, and its stored size is meaningless."""
    connection.execute("CREATE TEMP TABLE source (body jsonb)")
    connection.execute("INSERT INTO source VALUES (to_jsonb(repeat('x', 3000000)))")
    assert one(connection, "SELECT pg_column_size(body) < 100000 FROM source") == (True,)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', '1', 'e', body FROM source"
        )


def test_an_event_with_the_longest_names_can_be_parked(connection: Connection) -> None:
    """Guards against an index that has no room for them: a relay would start over again and again."""
    names = ("aggregate_type", "aggregate_id", "event_type", "idempotency_key", "correlation_id")
    written = insert(connection, **{name: noise(10_000) for name in (*names, "causation_id", "traceparent")})
    connection.execute(
        "SELECT outbox_park(ARRAY[%s::bigint], ARRAY['failed'], ARRAY[%s], '-infinity', 'infinity', 0, %s)",
        [written.seq, noise(10_000), written.seq],
    )
    assert one(connection, "SELECT length(aggregate_id) FROM outbox_parked") == (10_000,)


def test_no_index_has_an_unbounded_text(connection: Connection) -> None:
    """Guards against a long value that PostgreSQL refuses in its own words."""
    found = connection.execute(
        "SELECT indexrelid::regclass::text, attname FROM pg_index JOIN pg_attribute ON attrelid = indexrelid"
        " JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = c.relam"
        # A bloom filter has hashes.
        " WHERE indrelid::regclass::text !~ '^(pg_|information_schema)' AND attlen < 0 AND amname <> 'brin'"
    ).fetchall()
    # Digests of manifests; the names of this package's migrations, and of roles, which have 63 bytes at most.
    assert sorted(found) == [
        ("outbox_archive_changes_pkey", "manifest_sha256"),
        ("outbox_migrations_pkey", "name"),
        ("outbox_writers_pkey", "writer"),
    ]
