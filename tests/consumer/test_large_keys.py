"""A key of any length: what fails is handled again, and its partition goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Consumer, Counts, Event
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running, uuid7
from tests.noise import noise

Connection = psycopg.Connection[Any]


@pytest.mark.parametrize("on_dead_letter", ["continue", "block"])
def test_an_event_with_a_large_key_is_tried_again(place: Place, on_dead_letter: Any) -> None:
    """Guards against a partition that stands still, because an index refuses the row of the inbox."""
    key = noise(3_000)
    for n in range(3):
        ours = {"id": str(uuid7()), "event_type": "order.placed", "aggregate_type": "order"}
        place.put(f'{{"n": {n}}}', key=key, **ours)
    tried: list[int] = []
    consumer = place.bare(retry_seconds=0.05, max_attempts=3, on_dead_letter=on_dead_letter)

    @consumer.on("order.placed")
    def handle(event: Event, connection: Connection) -> None:
        tried.append(event.payload["n"])
        if tried.count(0) < 2:
            raise ValueError("no")
        effect(event, connection)

    with running(consumer) as run:
        wait_until(lambda: place.effects() == 3, what="all effects")
        assert run.end().dead_letters == 0
    assert place.rows("SELECT n FROM effects ORDER BY seq") == [(0,), (1,), (2,)]
    assert place.value("SELECT count(*) FROM effects WHERE key = %s", key) == 3


@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_same_with_each_driver(place: Place, driver: str) -> None:
    ours = {"id": str(uuid7()), "event_type": "order.placed", "aggregate_type": "order"}
    place.put('{"n": 0}', key=noise(3_000), **ours)

    async def refuse(event: Event, transaction: Any) -> None:
        raise ValueError("no")

    async def scenario() -> None:
        consumer = test_async.consumer(place, driver, refuse, max_attempts=1)
        async with test_async.running(consumer.run) as counts:
            await test_async.until(lambda: place.inbox() == {"failed": 1}, "a dead letter")
        assert counts == [Counts(received=1, failures=1, dead_letters=1)]

    asyncio.run(scenario())


def test_an_error_of_a_value_is_no_outage(place: Place) -> None:
    """Guards against an event that is repeated without end before its handler is called: G3, G10."""
    place.rows(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'too large' USING ERRCODE = 'program_limit_exceeded'; END $$"
    )
    bad = uuid7()
    place.rows(
        "CREATE TRIGGER refuse BEFORE INSERT ON processed_events FOR EACH ROW"
        f" WHEN (NEW.event_id = '{bad}' AND current_setting('outbox.handling', true) = 'on')"
        " EXECUTE FUNCTION refuse()"
    )
    place.send(bad, uuid7(), keys=2)
    consumer = place.consumer(max_attempts=1)
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 1 and place.inbox(), what="the other one's effect")
        counts = run.end()
    assert (counts.handled, counts.dead_letters) == (1, 1)
    assert "too large" in place.value("SELECT last_error FROM inbox")


@pytest.mark.parametrize("name", ["source", "group.id"])
def test_a_name_that_no_index_has_room_for_is_refused(name: str) -> None:
    source, group = noise(501), {"group.id": noise(501)}
    kafka = {"bootstrap.servers": "127.0.0.1:1"}
    with pytest.raises(SetupError, match=f"^{name} has 501 bytes, more than 500"):
        Consumer(
            source=source if name == "source" else "billing",
            topics=["orders"],
            kafka=kafka | (group if name == "group.id" else {}),
            dsn="",
        )


def test_processed_mark_refuses_a_long_source(place: Place) -> None:
    assert place.value("SELECT processed_mark(%s, %s)", uuid7(), noise(500)) is True
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="has 501 bytes, more than 500"):
        place.value("SELECT processed_mark(%s, %s)", uuid7(), noise(501))


def test_the_longest_names_fit_into_every_index(place: Place) -> None:
    source, topic = noise(500), noise(249)
    consumer = place.bare(source, topics=[topic], kafka={"group.id": noise(499)})
    assert consumer.source == source
    for table, columns in (
        ("processed_events", "(event_id, source, bucket) VALUES (gen_random_uuid(), %(source)s, -1)"),
        (
            "inbox",
            '(message_id, source, topic, partition, "offset", key, event_type, headers, sent_at)'
            " VALUES (gen_random_uuid(), %(source)s, %(topic)s, 0, 0, %(long)s, %(long)s, '[]', now())",
        ),
        (
            "partition_owners",
            "(source, consumer_group, topic, partition, owner)"
            " VALUES (%(source)s, %(source)s, %(topic)s, 0, gen_random_uuid())",
        ),
    ):
        with psycopg.connect(place.dsn) as connection:
            given = {"source": source, "topic": topic, "long": noise(1_000_000)}
            connection.execute(f"INSERT INTO {table} {columns}".encode(), given)


# The names in these are limited: see the test above. The event's key and its id are not.
_LIMITED = {
    # Names of files.
    "consumer_migrations_pkey": {"name"},
    "inbox_open": {"source", "topic", "state"},
    "inbox_age": {"source", "state"},
    "inbox_paused": {"source"},
    "partition_owners_pkey": {"source", "consumer_group", "topic"},
}


def test_no_index_has_an_unbounded_text(place: Place) -> None:
    found: dict[str, set[str]] = {}
    for index, column in place.rows(
        "SELECT indexrelid::regclass::text, attname FROM pg_index"
        " JOIN pg_attribute ON attrelid = indexrelid"
        " WHERE indrelid::regclass::text !~ '^(pg_|information_schema)' AND attlen < 0"
    ):
        if not index.startswith("processed_events"):
            found.setdefault(index, set()).add(column)
        else:
            assert column == "source"
    assert found == _LIMITED


def test_the_keys_of_an_inbox_are_read_from_its_index_alone(place: Place) -> None:
    """Guards against a look at all rows of the inbox each second."""
    _fill(place, "'billing'", 20_000)
    heads = {"source": "billing", "held": [], "named": [], "other_held": False, "limit": 100}
    taken = {"topics": "{orders}", "keys": "{1}", "source": "billing"}
    for block in (False, True):
        assert "Index Only Scan using inbox_open" in _plan(place, queries.HEADS, heads | {"block": block})
        plan = _plan(place, queries.TAKEN, taken | {"block": block})
        assert "inbox_open" in plan, plan
        assert "Seq Scan on inbox" not in plan, plan


def test_the_inbox_of_one_source_is_measured_without_the_rows_of_others(place: Place) -> None:
    """Guards against a look at all rows of the inbox every ten seconds, by each process of each source."""
    _fill(place, "'s' || n % 100", 1_000)
    _fill(place, "'billing'", 20_000)
    with psycopg.connect(place.dsn) as connection:
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {queries.STATUS}".encode()
        [([document],)] = connection.execute(explain, {"source": "s7"})
    read = document["Plan"]["Shared Hit Blocks"] + document["Plan"]["Shared Read Blocks"]
    assert read < 100, document


def _fill(place: Place, source: str, rows: int) -> None:
    columns = 'message_id, source, topic, partition, "offset", key, event_type, headers, sent_at'
    place.rows(
        f"INSERT INTO inbox ({columns}) SELECT gen_random_uuid(), {source}, 'orders', 0, n, (n % 20)::text,"
        f" 'a', '[]', now() FROM generate_series(1, {rows}) n"
    )
    place.rows("VACUUM (ANALYZE) inbox")


def _plan(place: Place, query: str, given: dict[str, Any]) -> str:
    with psycopg.connect(place.dsn) as connection:
        # A snapshot of another session can keep VACUUM from making the index alone the cheapest.
        connection.execute("SET enable_seqscan = off")
        rows = connection.execute(f"EXPLAIN {query}".encode(), given).fetchall()
    return "\n".join(line for (line,) in rows)
