"""Locks of commands: a moment for a session that is ending, then a refusal that names it; brief attempts."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from outbox_pipelines.database import connect, locks
from outbox_pipelines.database.locks import AdvisoryLock
from outbox_pipelines.relay import relay_sql, service
from outbox_pipelines.relay.service import Standby
from tests.conftest import Outbox

PACKAGE = Path(locks.__file__).parents[1]
ONE = AdvisoryLock("%(key)s::bigint")
TWO = AdvisoryLock("hashtext(%(name)s)", "%(n)s")
# A negative number, and halves that have their highest bit set.
CASES = [
    (ONE, {"key": -(7 << 40) - 5}),
    (ONE, {"key": 0x6F62_7805_F000_0001}),
    (TWO, {"name": "a", "n": 3}),
    (TWO, {"name": "outbox", "n": -1}),
]


@contextmanager
def ending(outbox: Outbox, query: LiteralString, *given: dict[str, object]) -> Iterator[None]:
    """A session takes locks, and ends while the block waits for them."""
    with connect(outbox.settings, name="killed") as other:
        for each in given:
            assert other.execute(query, each).fetchone() == (True,)
        timer = threading.Timer(locks.GOING_SECONDS / 4, other.close)
        timer.start()
        yield
        timer.join()


@pytest.mark.parametrize(("lock", "given"), CASES)
def test_another_session_has_it(
    outbox: Outbox, lock: AdvisoryLock, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a refusal that does not say whom to wait for."""
    monkeypatch.setattr(locks, "GOING_SECONDS", 0.1)
    with connect(outbox.settings, name="outbox: first") as first, connect(outbox.settings, name="b") as other:
        assert lock.take(first, given) is None
        for for_transaction in (False, True):
            who = lock.take(other, given, for_transaction=for_transaction)
            assert who is not None
            assert who.startswith(f"session {first.info.backend_pid} of role ")
            assert "(outbox: first), since 20" in who
        # Another number is free.
        assert lock.take(other, {**given, "key": 1, "n": 9}) is None
        lock.unlock(first, given)
        assert lock.take(other, given) is None


@pytest.mark.parametrize(("lock", "given"), CASES)
def test_a_session_that_is_ending(outbox: Outbox, lock: AdvisoryLock, given: dict[str, object]) -> None:
    """Guards against a command, repeated after a kill, that is refused by its own dead session."""
    query: LiteralString = f"SELECT pg_try_advisory_lock({lock._key})"
    with connect(outbox.settings, name="next") as connection, ending(outbox, query, given):
        assert lock.take(connection, given) is None


@pytest.mark.parametrize("standby", [Standby.REFUSE, Standby.NEXT])
def test_a_relay_after_one_that_was_killed(outbox: Outbox, standby: Standby) -> None:
    """Guards the same for a run until empty, and for a session of Dagster."""
    outbox.write("a")
    schema = outbox.settings.db_schema
    given = [{"lock": f"{schema}.{name}", "shard": 0} for name in ("outbox_shards", "outbox_shards.next")]
    with ending(outbox, relay_sql.TRY_LOCK, *given):
        assert service.relay(outbox.settings, shard=0, until_empty=True, standby=standby).events == 1


def test_a_relay_that_must_not_wait(outbox: Outbox) -> None:
    """Guards against a relay of a fleet that holds the place of those that could begin."""
    with connect(outbox.settings, name="other") as other:
        given = {"lock": f"{outbox.settings.db_schema}.outbox_shards", "shard": 0}
        other.execute(relay_sql.TRY_LOCK, given)
        with pytest.raises(service.ShardOwnedError):
            service.relay(outbox.settings, shard=0, standby=Standby.SKIP)


def test_each_lock_of_a_command_is_one_of_these() -> None:
    """Guards against a command that tries a lock once. Relays and fleets try again by themselves."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"pg_try_advisory", path.read_text())
    }
    assert found == {
        "database/locks.py",
        "relay/fleet/fleet_sql.py",
        "relay/relay_sql.py",
        "existing/existing_sql.py",
    }


def test_brief_attempts_end() -> None:
    """Guards against a command that never ends, or gives up at the first transaction that has the lock."""
    pauses: list[float] = []
    for attempt in locks.briefly(times=3, pause=(0.5, 0.5), wait=pauses.append):
        with attempt:
            raise psycopg.errors.LockNotAvailable
    assert pauses == [0.5, 0.5]
    for attempt in locks.briefly(wait=lambda seconds: bool(pauses.pop())):
        with attempt:
            raise psycopg.errors.LockNotAvailable
    assert pauses == [0.5]
    for attempt in locks.briefly(seconds=-1, wait=pauses.append):
        with attempt:
            raise psycopg.errors.LockNotAvailable
    assert pauses == [0.5]


@pytest.mark.parametrize("error", [psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected])
def test_only_a_statement_that_is_cut_is_tried_again(error: type[psycopg.Error]) -> None:
    """Guards against a command that an operator cannot cancel, and one that its own time limit ends."""
    for attempt in locks.briefly(times=2, pause=(0, 0), is_cut=True):
        with attempt:
            raise error
    with pytest.raises(error), next(locks.briefly()):
        raise error
