"""A pooler between the relay and its database: refused where it would make the lock worthless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outbox_pipelines.relay import service
from tests.conftest import Outbox
from tests.pgbouncer import pgbouncer

Pooled = Callable[..., Outbox]
_LOCKS = """
SELECT * FROM pg_locks WHERE locktype = 'advisory'
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
# The name is one that a pooler itself passes on.
_SET = "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name <> 'application_name'"


@pytest.fixture
def pooled(outbox: Outbox, tmp_path: Path) -> Iterator[Pooled]:
    """The outbox behind a pgbouncer with these settings."""
    with ExitStack() as poolers:

        def start(**settings: object) -> Outbox:
            dsn = poolers.enter_context(pgbouncer(outbox.settings.require_dsn(), tmp_path, **settings))
            return Outbox(outbox.settings.model_copy(update={"dsn": dsn}))

        yield start


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_mode": "transaction", "default_pool_size": 1},
        {"pool_mode": "transaction", "default_pool_size": 20},
        {"pool_mode": "transaction", "default_pool_size": 20, "server_round_robin": 1},
        {"pool_mode": "statement", "default_pool_size": 5},
    ],
)
def test_a_pooler_that_shares_sessions_is_refused(
    outbox: Outbox, pooled: Pooled, settings: dict[str, object]
) -> None:
    """Guards against two relays that both believe to hold the shard."""
    outbox.write(1)
    behind = pooled(**settings)
    # Servers that others have left behind are there to be handed out.
    others = [behind.connect() for _ in range(3)]
    for other in others:
        other.close()
    for _ in range(3):
        done = behind.outbox("relay", "--until-empty")
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("outbox: OUTBOX_DSN leads through a pooler in transaction mode")
        assert "name the database itself, or a pool in session mode" in done.stderr
    assert outbox.messages() == []


def test_a_pool_in_session_mode_will_do(outbox: Outbox, pooled: Pooled) -> None:
    """Guards against refusing a pooler that does no harm."""
    outbox.write(1, 2)
    behind = pooled(pool_mode="session", default_pool_size=20)
    assert service.relay(behind.settings, until_empty=True).events == 2


def test_commands_leave_nothing_in_a_pool(outbox: Outbox, pooled: Pooled) -> None:
    """Guards against a lock that outlives its command, and settings that reach the application's sessions."""
    behind = pooled(pool_mode="transaction", default_pool_size=20, server_round_robin=1)
    for other in [behind.connect() for _ in range(3)]:
        other.close()
    for command in (
        ["cdc", "setup"],
        ["cutover", "--to", "polling"],
        ["shards", "set", "2"],
        ["partitions", "attach", str(datetime.now(UTC).date())],
        ["status"],
        ["dead-letters", "list"],
        ["reconcile", str(datetime.now(UTC).date())],
    ):
        refused = behind.outbox(*command)
        assert refused.returncode == 2, (command, refused.stdout, refused.stderr)
        assert "leads through a pooler in transaction mode" in refused.stderr
    with outbox.connect() as connection:
        found = connection.execute(_LOCKS).fetchall()
    assert found == []
    with behind.connect() as connection:
        # Of a server connection that each of the commands had.
        assert connection.execute(_SET).fetchall() == []


def test_a_slot_needs_a_direct_connection(outbox: Outbox, pooled: Pooled) -> None:
    """Guards against a slot that no relay could read, and against a refusal without a remedy."""
    behind = pooled(pool_mode="session", default_pool_size=20)
    made = behind.outbox("cdc", "setup")
    if made.returncode == 0:
        pytest.skip("this pgbouncer passes the replication protocol on")
    assert (made.returncode, made.stdout) == (2, "")
    plan = behind.outbox("cutover", "--to", "cdc", "--dry-run")
    assert (plan.returncode, plan.stdout) == (2, "")
    for refused in (made, plan):
        assert "name the server itself instead of a pooler" in refused.stderr
