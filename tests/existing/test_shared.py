"""Several relays on one table whose consumers need no order (`order = "none"`)."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import table_measurements
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import command, topic_prefix, wait_until
from tests.existing import textbook
from tests.existing.conftest import Make
from tests.existing.textbook import Table
from tests.relay import faults
from tests.relay.conftest import new_database
from tests.relay.topic import NOISE, create_topic

BY_SEQ: Final = textbook.PUBLISHED_AT_MAPPING.replace("[columns]", 'order = "none"\n[columns]\nseq = "seq"')
BY_ID: Final = textbook.PUBLISHED_AT_MAPPING.replace("[columns]", 'order = "none"\n[columns]')


@pytest.fixture(params=[pytest.param(BY_SEQ, marks=pytest.mark.extended), BY_ID], ids=["seq", "id"])
def shared(request: pytest.FixtureRequest, make_table: Make) -> Table:
    return make_table(textbook.PUBLISHED_AT, request.param)


def _times(table: Table) -> Counter[int]:
    """How often each event was published, by the number in its body."""
    return Counter(json.loads(message.value or "")["n"] for message in table.messages())


def _is_empty(table: Table) -> bool:
    with table.connect() as connection:
        return connection.execute("SELECT count(*) FROM events WHERE published_at IS NULL").fetchone() == (0,)


def _owners(table: Table) -> list[str]:
    owner = table_measurements.read(table.settings).shards[0].owner
    return owner.split("; ") if owner else []


def test_relays_share_the_rows(shared: Table) -> None:
    """Guards against a row that two relays publish, and a relay that waits for another one."""
    small = shared.environment | {"OUTBOX_BATCH_EVENTS": "100"}
    with (
        faults.process(command("relay"), small) as first,
        faults.process(command("relay"), small) as second,
    ):
        wait_until(lambda: len(_owners(shared)) == 2, what="both relays")
        shared.fill(10_000)
        wait_until(lambda: _is_empty(shared), what="everything published")
        for relay in (first, second):
            relay.terminate()
        counts = [_published(relay.communicate(timeout=600)[1]) for relay in (first, second)]
    assert min(counts) > 500
    assert sum(counts) == 10_000
    assert _times(shared) == dict.fromkeys(range(1, 10_001), 1)


def _published(log: str) -> int:
    found = re.findall(r"published (\d+) events", log.replace(",", ""))
    return int(found[-1])


def test_a_row_that_another_session_has_locked_delays_only_itself(shared: Table) -> None:
    [locked, _, _] = shared.write(("a", {"n": 1}), ("a", {"n": 2}), ("b", {"n": 3}))
    with shared.relayed():
        with shared.connect(autocommit=False) as connection:
            connection.execute("SELECT FROM events WHERE seq = %s FOR UPDATE", [locked])
            shared.write(("a", {"n": 4}))
            wait_until(lambda: set(_times(shared)) >= {4}, what="a later event of the aggregate")
            connection.rollback()
        wait_until(lambda: _is_empty(shared), what="the row that was locked")
    assert _times(shared) == {1: 1, 2: 1, 3: 1, 4: 1}


@pytest.mark.extended
def test_a_refused_event_becomes_one_dead_letter(shared: Table) -> None:
    """Guards against attempts that each relay counts for itself, and a refusal that stops the others."""
    shared.make_topic(1, **{"max.message.bytes": "3000"})
    few: dict[str, Any] = {"max_attempts": 4, "retry_seconds": 0.05}
    with shared.relayed(**few), shared.relayed(**few):
        [guilty] = shared.write(("a", {"n": 1, "text": NOISE}))
        shared.write(*(("a", {"n": n}) for n in range(2, 50)))
        wait_until(lambda: shared.pending() == [guilty], what="all others")
        wait_until(
            lambda: table_measurements.read(shared.with_(**few).settings).dead_letters == 1,
            what="the dead letter",
        )
    [(tries, error)] = shared.rows("retry_count, last_error")[:1]
    assert tries in (4, 5)
    assert "larger than" in error
    assert set(_times(shared)) == set(range(2, 50))


@pytest.mark.extended
def test_relays_that_are_killed(shared: Table) -> None:
    """Guards against rows that a killed relay takes with it."""
    with ExitStack() as relays:
        first = relays.enter_context(faults.process(command("relay"), shared.environment))
        relays.enter_context(faults.process(command("relay"), shared.environment))
        wait_until(lambda: len(_owners(shared)) == 2, what="both relays")
        shared.fill(20_000)
        wait_until(lambda: len(shared.pending()) < 20_000, what="the first rows")
        first.kill()
        wait_until(lambda: _is_empty(shared), what="the rest")
        assert len(_owners(shared)) == 1
    assert set(_times(shared)) == set(range(1, 20_001))


def test_a_relay_that_keeps_an_order_does_not_start_beside_them(make_table: Make) -> None:
    shared = make_table(textbook.PUBLISHED_AT, BY_SEQ)
    with shared.relayed():
        with pytest.raises(SetupError, match="by a description that differs"):
            shared.described(textbook.PUBLISHED_AT_MAPPING).drain()
        shared.write(("a", {"n": 1}))
        wait_until(lambda: _is_empty(shared), what="the event, by the relay that was first")


def test_a_run_until_empty_leaves_what_others_have(shared: Table) -> None:
    """Guards against a run that waits for rows of another relay without an end."""
    shared.write(("a", {"n": 1}), ("b", {"n": 2}))
    with shared.connect(autocommit=False) as connection:
        connection.execute("SELECT FROM events WHERE aggregate_id = 'a' FOR UPDATE")
        assert shared.drain().events == 1
    assert _times(shared) == {2: 1}
    assert shared.drain().events == 1


@pytest.mark.extended
@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is killed"])
def test_a_broker_that_stands_still(
    killable: tuple[Postgres, Kafka], tmp_path: Path, is_killed: bool
) -> None:
    """Guards against rows that another relay takes while Kafka may still get what the first one sent (G5);
    and against rows that no other relay gets when the first one dies."""
    postgres, kafka = killable
    where = new_database(postgres), kafka.bootstrap, f"{topic_prefix()}-{{aggregate_type}}-events"
    table = textbook.make(*where, textbook.PUBLISHED_AT, BY_SEQ)
    create_topic(table.outbox, 1)
    environment = table.environment | {"OUTBOX_BREAKER_SECONDS": "1"}
    with (
        faults.process(command("relay"), environment) as first,
        faults.process(command("relay"), environment) as second,
    ):
        wait_until(lambda: len(_owners(table)) == 2, what="both relays")
        table.fill(200)
        wait_until(lambda: _is_empty(table), what="the first rows")
        kafka.freeze()
        try:
            second.send_signal(signal.SIGSTOP)
            table.fill(100)
            wait_until(lambda: _longest_claim(table) > 0, what="a claim of the first relay")
            second.send_signal(signal.SIGCONT)
            wait_until(lambda: _longest_claim(table) > 3.0, seconds=20, what="a claim that stays")
            if is_killed:
                first.kill()
        finally:
            kafka.thaw()
        wait_until(lambda: _is_empty(table), what="everything published")
        left = [second] if is_killed else [first, second]
        for relay in left:
            relay.terminate()
        logs = "".join(relay.communicate(timeout=120)[1] for relay in left)
    times = Counter(message.headers["id"] for message in table.messages())
    assert len(times) == 300
    assert is_killed or sum(times.values()) == 300
    assert "deleted" not in logs


def _longest_claim(table: Table) -> float:
    """How many seconds the oldest claim has been open."""
    with table.connect() as connection:
        row = connection.execute(
            "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 "
            "FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL "
            "AND pid <> pg_backend_pid()"
        ).fetchone()
    assert row is not None
    return float(row[0])
