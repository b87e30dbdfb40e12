"""A commit of ours whose wait for a synchronous standby is canceled is no success."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from outbox_pipelines.core.outages import is_outage
from outbox_pipelines.database import connect
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import Outbox, wait_until
from tests.relay.threads import quick, running, wait_until_relayed

_WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


def _standby(outbox: Outbox, name: str) -> None:
    with outbox.connect() as admin:
        admin.execute("SET synchronous_commit = local")
        admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
        admin.execute("SELECT pg_reload_conf()")


def _cancel(outbox: Outbox) -> None:
    with outbox.connect() as admin:
        wait_until(lambda: admin.execute(_WAITING).fetchall(), what="a commit that waits")
        admin.execute(f"SELECT pg_cancel_backend(pid) FROM ({_WAITING}) AS waiting".encode())


@pytest.fixture
def own(own_servers: tuple[Postgres, Kafka, Outbox]) -> Iterator[Outbox]:
    """An outbox on a server that may have a standby that does not answer."""
    yield own_servers[2]
    _standby(own_servers[2], "")


@pytest.mark.parametrize("in_transaction", [False, True])
def test_it_is_an_error(own: Outbox, in_transaction: bool) -> None:
    """Guards against another system that moves after a commit which a failover can undo."""
    _standby(own, "missing")

    def commit(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        while True:
            # Until the server has the setting.
            if in_transaction:
                with connection.transaction():
                    connection.execute("SELECT pg_logical_emit_message(true, '', '')")
            else:
                connection.execute("SELECT pg_logical_emit_message(true, '', '')")

    with connect(own.settings, name="test") as connection, ThreadPoolExecutor() as threads:
        committed = threads.submit(commit, connection)
        _cancel(own)
        with pytest.raises(psycopg.OperationalError, match="a failover can undo it") as refused:
            committed.result(60)
        assert is_outage(refused.value)
        assert connection.closed


def test_a_relay_goes_on(own: Outbox) -> None:
    """Guards against a relay that ends, or loses an event, because an operator has ended such a wait."""
    with running(quick(own)):
        own.fill(10)
        wait_until_relayed(own)
        _standby(own, "missing")
        with own.connect() as writer:
            writer.execute("SET synchronous_commit = local")
            writer.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES ('order', '1', 'order.placed', '{}')"
            )
        _cancel(own)
        _cancel(own)
        _standby(own, "")
        wait_until_relayed(own)
    assert len({message.headers["id"] for message in own.messages()}) == 11


@pytest.mark.extended
def test_the_status_says_what_a_relay_waits_for(own: Outbox) -> None:
    """Guards against a backlog without a reason: Kafka has the events, and the position is not committed."""
    with running(quick(own)):
        own.fill(10)
        wait_until_relayed(own)
        _standby(own, "missing")
        with own.connect() as admin:
            wait_until(lambda: admin.execute(_WAITING).fetchall(), what="a commit that waits")
        text = "wait for a synchronous standby"
        wait_until(lambda: text in own.outbox("status").stdout, pace=1.0, what="a line of the status")
        _standby(own, "")
        wait_until_relayed(own)
        assert text not in own.outbox("status").stdout
