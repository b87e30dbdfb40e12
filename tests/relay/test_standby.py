"""A primary with a streaming standby: all connections of a relay lead to one server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.database import connect
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.local import Stack
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.shard import Shard
from tests.conftest import Outbox, wait_until
from tests.history.proxy import Proxy
from tests.relay.standby import Pair, replicated
from tests.relay.threads import running


@pytest.fixture
def pair(tmp_path: Path, stack: Stack) -> Iterator[Pair]:
    with replicated(tmp_path, stack) as both:
        yield both


def test_every_connection_finds_the_primary(pair: Pair) -> None:
    """Guards against a reader on the standby, which takes open transactions for finished ones and skips
    what they commit; and against commands that do not see the lock of the owner."""
    with psycopg.connect(pair.primary.dsn) as late, running(pair.outbox.settings):
        late.execute("SELECT pg_current_xact_id()")
        with psycopg.connect(pair.primary.dsn) as early:
            Outbox(pair.straight(pair.primary)).write("early")
        wait_until(lambda: len(pair.outbox.messages()) == 1)
        late.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "VALUES ('order', 'late', 'order.placed', '{}')"
        )
        late.commit()
        wait_until(lambda: len(pair.outbox.messages()) == 2, what="the late event")
        assert outbox_measurements.read(pair.outbox.settings).shards[0].owner is not None
        early.close()
    with pytest.raises(UnavailableError, match="leads to a standby"):
        connect(pair.straight(pair.standby), name="alone")


@pytest.mark.extended
def test_a_reader_on_another_server_is_refused(pair: Pair) -> None:
    """Guards against a balancer that sends the reader elsewhere than the shard's session."""
    with Proxy(pair.primary.port) as balancer:
        dsn = psycopg.conninfo.make_conninfo(pair.primary.dsn, port=balancer.port)
        shard = Shard(pair.outbox.settings.model_copy(update={"dsn": dsn}), 0, "a")
        assert shard.try_take()
        shard.connect("reader").close()
        balancer._target = pair.standby.port
        with pytest.raises(UnavailableError, match="leads to a standby"):
            shard.connect("reader")
        pair.promote()
        # By now the standby accepts everything that a primary does. No session has a lock there.
        with pytest.raises(ShardLostError, match="does not see the lock of shard 0"):
            shard.connect("reader")
        balancer._target = pair.primary.port
        shard.connect("reader").close()
        with psycopg.connect(pair.primary.dsn, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_locks "
                "WHERE locktype = 'advisory' AND objsubid = 2"
            )
        with pytest.raises(ShardLostError):
            shard.connect("reader")
        shard.close()


@pytest.mark.extended
def test_a_failover_is_an_outage(pair: Pair) -> None:
    """Guards against a relay that ends while the standby is not promoted yet, as if a setting were wrong."""
    with running(pair.outbox.settings):
        Outbox(pair.straight(pair.primary)).write(1)
        wait_until(lambda: len(pair.outbox.messages()) == 1)
        with psycopg.connect(pair.primary.dsn, autocommit=True) as connection:
            ((lsn,),) = connection.execute("SELECT pg_current_wal_lsn()")
        with psycopg.connect(pair.standby.dsn, autocommit=True) as standby:
            wait_until(
                lambda: standby.execute("SELECT pg_last_wal_replay_lsn() >= %s", [lsn]).fetchone() == (True,)
            )
            pair.primary.kill()
            # It has looked for a primary while there was none, and has to wait.
            wait_until(lambda: _visits(standby) > 2, what="the relay to come by")
        pair.promote()
        Outbox(pair.straight(pair.standby)).write(2)
        wait_until(lambda: len({m.headers["id"] for m in pair.outbox.messages()}) == 2, seconds=30)
    assert service.relay(pair.outbox.settings, until_empty=True).events == 0


def _visits(standby: psycopg.Connection[tuple[object, ...]]) -> int:
    """How many sessions this server has had since it was asked first."""
    row = standby.execute("SELECT sessions FROM pg_stat_database WHERE datname = 'postgres'").fetchone()
    assert row is not None
    return int(str(row[0]))
