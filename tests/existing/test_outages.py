"""Servers that become unavailable and come back while the relay of a marked table runs (G1, G4)."""

from __future__ import annotations

import signal

import pytest

from outbox_pipelines.existing import table_measurements
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import command, patience, wait_until
from tests.existing.textbook import Table
from tests.relay import faults


def _wait_until_relayed(table: Table) -> None:
    wait_until(
        lambda: table_measurements.read(table.settings).unpublished == 0, seconds=60, what="no backlog"
    )


def _holds_vacuum_back(table: Table) -> bool:
    """Whether a session of the relay has a snapshot or a transaction id."""
    with table.connect() as connection:
        rows = connection.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL OR xact_start IS NOT NULL)"
        ).fetchall()
    return bool(rows)


@pytest.mark.extended
def test_kafka_is_frozen_for_a_while(own_table: tuple[Postgres, Kafka, Table]) -> None:
    """Guards against events doubled by an outage, and claims that stay open through it: they would hold
    vacuum back."""
    _, kafka, table = own_table
    table.write(("a", {"n": 0}))
    environment = table.environment | {"OUTBOX_BREAKER_SECONDS": "1"}
    with faults.process(command("relay"), environment) as relay:
        _wait_until_relayed(table)
        kafka.freeze()
        table.fill(5_000)
        wait_until(lambda: table_measurements.read(table.settings).shards_without_kafka == 1)
        wait_until(lambda: not _holds_vacuum_back(table), what="no open transaction")
        with table.connect() as connection:
            notices: list[str] = []
            connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
            connection.execute("UPDATE events SET headers = '{}'")
            connection.execute("VACUUM (VERBOSE) events")
        assert "0 are dead but not yet removable" in "".join(notices)
        kafka.thaw()
        _wait_until_relayed(table)
        wait_until(lambda: table_measurements.read(table.settings).shards_without_kafka == 0)
        assert relay.poll() is None
    assert len(table.messages()) == len({message.headers["id"] for message in table.messages()}) == 5_001
    assert set(table.rows("retry_count, last_error")) == {(0, None)}


def test_the_database_restarts(own_table: tuple[Postgres, Kafka, Table]) -> None:
    """Guards against a relay that must be started again by hand."""
    postgres, _, table = own_table
    with faults.process(command("relay"), table.environment) as relay:
        for n in range(2):
            table.write(("a", {"n": n}))
            _wait_until_relayed(table)
            postgres.kill()
            postgres.start()
        table.write(("a", {"n": 2}))
        _wait_until_relayed(table)
        assert relay.poll() is None
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(patience(20)) == 0
    assert table.numbers("a") == [0, 1, 2]


@pytest.mark.extended
def test_both_become_unavailable(own_table: tuple[Postgres, Kafka, Table]) -> None:
    """Guards against attempts burnt by an outage, and a relay that waits for one while the other one comes
    back."""
    postgres, kafka, table = own_table
    with faults.process(command("relay"), table.environment | {"OUTBOX_BREAKER_SECONDS": "1"}) as relay:
        table.write(("a", {"n": 0}))
        _wait_until_relayed(table)
        kafka.kill()
        table.write(("a", {"n": 1}))
        postgres.kill()
        postgres.start()
        table.write(("a", {"n": 2}))
        kafka.start()
        _wait_until_relayed(table)
        assert relay.poll() is None
    assert sorted(set(table.numbers("a"))) == [0, 1, 2]
    # A broker that has just started may not know its topics yet, and `last_error` says so; nothing else does.
    rows = table.rows("retry_count, last_error")
    assert {attempts for attempts, _ in rows} == {0}
    unknown = ("topic not found", "does not exist")
    assert all(error is None or any(text in error for text in unknown) for _, error in rows), rows
