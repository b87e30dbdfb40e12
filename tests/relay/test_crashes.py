"""Events that crash the process: detected and made dead letters, without a commit for each event (G3)."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any, Final

import pytest
from confluent_kafka import KafkaError

from outbox_pipelines.database import Connection
from outbox_pipelines.relay import relay_sql, service
from outbox_pipelines.relay.core.retries import MAX_CRASHES
from outbox_pipelines.relay.lease.shard import Shard
from tests import forks
from tests.conftest import EITHER_DELIVERY, Outbox, clean_environment, either, wait_until
from tests.history import mock
from tests.relay.faults import relay
from tests.relay.parked import numbers, numbers_by_key, parked_rows, write

# Between two looks for what lasts for some milliseconds.
_QUICK: Final = 0.001
# A relay whose encoder crashes the process at a payload with "deadly" in it, as a fault in a C library would.
RELAY = """
import os, signal, sys
from outbox_pipelines.relay.kafka import message
plain = message._plain
def deadly(*given):
    encode = plain(*given)
    def crashing(event):
        if '"deadly"' in event.payload:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(event)
    return crashing
message._plain = deadly
from outbox_pipelines.__main__ import main
sys.argv = ["outbox", "relay", "--until-empty"]
main()
"""

# The same at the moment at which the content has been read, as where there is too little memory for it.
READER = """
import os, signal, sys
from outbox_pipelines.relay.core import retries
from outbox_pipelines.relay.read import contents, snapshots
weigh = snapshots.weigh
def deadly(events):
    events = list(events)
    if any('"deadly"' in (event.payload or "") for event in events):
        os.kill(os.getpid(), signal.SIGKILL)
    return weigh(events)
snapshots.weigh = retries.weigh = deadly
contents.weigh_one = lambda event: deadly([event])
from outbox_pipelines.__main__ import main
sys.argv = ["outbox", "relay", "--until-empty"]
main()
"""


def _run(outbox: Outbox, program: str = RELAY, **environment: str) -> int:
    given = clean_environment() | outbox.environment | environment
    command = [sys.executable, "-c", program]
    done = forks.run(command, env=given, capture_output=True, text=True, timeout=600)
    # Shown where a test fails: why a relay that was to crash has ended.
    print(done.stderr)
    return int(done.returncode)


def _run_until_it_lives(outbox: Outbox, program: str = RELAY, **environment: str) -> int:
    """Run the relay until no event waits because of a crash either; return the number of crashes."""
    quick = {"OUTBOX_RETRY_SECONDS": "0.1", **environment}
    crashes = 0
    while True:
        code = _run(outbox, program, **quick)
        assert code in (0, 1, -signal.SIGKILL)
        crashes += code == -signal.SIGKILL
        assert crashes < 12, "the relay crashes without end"
        if code == -signal.SIGKILL:
            continue
        if not _paused(outbox):
            return crashes
        wait_until(lambda: all(due for _, due in _paused(outbox)), seconds=30, what="the pause to end")


def _paused(outbox: Outbox) -> list[tuple[int, bool]]:
    """Events that wait after a crash: the number of crashes of each, and whether it is due."""
    with outbox.connect() as connection:
        return connection.execute(
            "SELECT crashes, coalesce(next_attempt_at <= clock_timestamp(), true) FROM outbox_parked "
            "WHERE crashes > 0 AND state IN ('retrying', 'replaying') ORDER BY seq"
        ).fetchall()


@pytest.mark.parametrize(("events", "at"), either((1, 0), (3000, 1234)))
def test_an_event_that_crashes_the_relay_becomes_a_dead_letter(outbox: Outbox, events: int, at: int) -> None:
    """Guards against an endless crash loop, and against blaming an event that is not the cause."""
    payloads: list[tuple[str, Any]] = [(str(n % 50), {"n": n}) for n in range(events)]
    payloads[at] = ("guilty", {"n": at, "deadly": True})
    ids = write(outbox, *payloads, ("guilty", {"n": events}))
    assert _run_until_it_lives(outbox) <= 6
    assert parked_rows(outbox) == [("guilty", ids[at], "failed", 0)]
    assert len({message.headers["id"] for message in outbox.messages()}) == events
    assert numbers(outbox, "guilty") == [events]
    with outbox.connect() as connection:
        row = connection.execute(
            "SELECT s.crashes, crash_guard_seq, crash_guard_crashes, last_error "
            "FROM outbox_shards s, outbox_parked"
        ).fetchone()
    assert row is not None
    assert row[:3] == (0, None, 0)
    assert "crashed 3 times" in row[3]


@pytest.mark.extended
def test_an_event_that_crashes_the_reader_becomes_a_dead_letter(outbox: Outbox) -> None:
    """Guards against a crash loop at a row that is marked only after its content was read."""
    payloads: list[tuple[str, Any]] = [(str(n % 50), {"n": n}) for n in range(1000)]
    payloads[434] = ("guilty", {"n": 434, "deadly": True})
    ids = write(outbox, *payloads)
    assert _run_until_it_lives(outbox, READER) <= 6
    assert parked_rows(outbox) == [("guilty", ids[434], "failed", 0)]
    assert len({message.headers["id"] for message in outbox.messages()}) == 999


def test_crashes_count_in_a_container_restarted_in_place(outbox: Outbox) -> None:
    """Guards against a crash loop where every process has the same host name and process id."""
    write(outbox, ("guilty", {"deadly": True}), ("other", {"n": 0}))
    in_place = "import os; own = os.getpid(); os.getpid = lambda: 7" + RELAY.replace("os.getpid()", "own")
    given = clean_environment() | outbox.environment
    for _ in range(2):
        died = forks.run([sys.executable, "-c", in_place], env=given, capture_output=True, timeout=600)
        assert died.returncode == -signal.SIGKILL
        with outbox.connect() as connection:
            ((owner,),) = connection.execute("SELECT owner FROM outbox_shards").fetchall()
            assert ":7:" in owner
    with outbox.connect() as connection:
        assert connection.execute("SELECT crashes FROM outbox_shards").fetchone() == (1,)


@pytest.mark.extended
def test_a_replayed_event_that_crashes_the_relay_is_a_dead_letter_again(outbox: Outbox) -> None:
    """Guards against an operator's replay that brings the crash loop back."""
    ids = write(outbox, ("guilty", {"n": 0, "deadly": True}), ("other", {"n": 0}))
    _run_until_it_lives(outbox)
    with outbox.connect() as connection:
        connection.execute(
            "UPDATE outbox_parked SET state = 'replaying', next_attempt_at = NULL, crashes = 0"
        )
    assert _run_until_it_lives(outbox) <= 4
    assert parked_rows(outbox)[0][:3] == ("guilty", ids[0], "failed")


@pytest.mark.extended
def test_a_run_of_released_events_with_a_killer_in_it(outbox: Outbox) -> None:
    """Guards against a crash loop among events that waited behind another one."""
    ids = write(outbox, *[("a", {"n": n}) for n in range(20)])
    with outbox.connect() as connection:
        # As after a refusal: the first is to be tried, the others wait; one of those kills.
        service.relay(outbox.settings, until_empty=True)
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, CASE WHEN seq = (SELECT min(seq) FROM outbox) "
            "THEN 'retrying' ELSE 'waiting' END, 0, now(), NULL FROM outbox"
        )
        connection.execute(
            "UPDATE outbox_parked SET payload = payload || '{\"deadly\": 1}' WHERE id = %s", [ids[12]]
        )
    _run_until_it_lives(outbox)
    assert parked_rows(outbox) == [("a", ids[12], "failed", 0)]
    with outbox.connect() as connection:
        ((error,),) = connection.execute("SELECT last_error FROM outbox_parked")
    assert error == "the relay crashed 3 times while this event was being published"
    # Once by the first drain, once as a parked event; again for a run that was in flight at the crash.
    again = numbers(outbox, "a")[20:]
    first = list(dict.fromkeys(again))
    assert first == [n for n in range(20) if n != 12]


def test_kills_from_outside_blame_no_event(outbox: Outbox, is_short: bool) -> None:
    """Guards against dead letters made by an operator's kill -9, or by an orchestrator in an outage."""
    outbox.fill(10_000)
    for n in range(0, 12, 3 if is_short else 2):
        process: forks.Popen[str] = forks.Popen(
            [sys.executable, "-m", "outbox_pipelines", "relay"],
            env=clean_environment() | outbox.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "taken" in line:
                break
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.002 * n)
        process.kill()
        process.wait()
        process.stderr.close()
    service.relay(outbox.settings, until_empty=True)
    assert parked_rows(outbox) == []
    assert len({message.headers["id"] for message in outbox.messages()}) == 10_000


@pytest.mark.extended
def test_kills_while_single_events_are_published_blame_no_event(outbox: Outbox) -> None:
    """Guards against the same in the flow of all events: where relays have crashed, each is marked (G1)."""
    write(outbox, *[(str(n % 30), {"n": n}) for n in range(300)])
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET owner = 'died', crashes = 2")
        for _ in range(4):
            before = _marking(connection)
            with relay(outbox) as process:
                wait_until(lambda: _marking(connection) - before, pace=_QUICK, what="a mark")  # noqa: B023
                process.kill()
                process.wait()
        with relay(outbox):
            wait_until(lambda: len(outbox.messages()) >= 200, seconds=60, what="others to go on")
        assert {row[2] for row in parked_rows(outbox)} <= {"waiting", "retrying"}
        connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp()")
    with relay(outbox, OUTBOX_RETRY_SECONDS="0.1"):
        wait_until(
            lambda: len({message.headers["id"] for message in outbox.messages()}) == 300,
            seconds=60,
            what="all to be published",
        )
    for key, found in numbers_by_key(outbox.messages()).items():
        assert list(dict.fromkeys(found)) == list(range(int(key), 300, 30))


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_kills_while_parked_events_are_tried_blame_no_event(outbox: Outbox, delivery: str) -> None:
    """Guards against a supervisor that kills each relay after its start, and so makes dead letters (G1)."""
    write(outbox, *[(str(n % 30), {"n": n}) for n in range(300)])
    with outbox.connect(autocommit=False) as connection:
        connection.execute("LOCK TABLE outbox IN SHARE MODE")
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, CASE WHEN seq < (SELECT min(seq) FROM outbox) + 30 "
            "THEN 'retrying' ELSE 'waiting' END, 0, now(), NULL FROM outbox"
        )
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
    with outbox.connect() as connection:
        for _ in range(MAX_CRASHES + 1):
            # Those of the relay before are still there when the next one starts.
            before = _marks(connection)
            with relay(outbox, OUTBOX_DELIVERY=delivery, OUTBOX_LEASE_SECONDS="2") as process:
                wait_until(lambda: _marks(connection) - before, pace=_QUICK, what="an attempt")  # noqa: B023
                process.kill()
                process.wait()
        states = connection.execute("SELECT state, max(crashes) FROM outbox_parked GROUP BY state").fetchall()
        assert "failed" not in dict(states)
        assert dict(states)["retrying"] >= 1, "no kill came while an event was tried"
        connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp()")
    # The pause after the last kill is this one's.
    with relay(outbox, OUTBOX_DELIVERY=delivery, OUTBOX_RETRY_SECONDS="0.1"):
        wait_until(lambda: parked_rows(outbox) == [], seconds=60, what="all to be published")
    for key, found in numbers_by_key(outbox.messages()).items():
        assert list(dict.fromkeys(found)) == list(range(int(key), 300, 30))


@pytest.mark.extended
def test_an_event_that_waits_after_a_crash_ends_a_run_until_empty(outbox: Outbox) -> None:
    """Guards against a run that waits for minutes, or that says that all is published."""
    write(outbox, ("guilty", {"n": 0, "deadly": True}), ("guilty", {"n": 1}), ("other", {"n": 0}))
    with outbox.connect() as connection:
        service.relay(outbox.settings, until_empty=True)
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, CASE WHEN seq = (SELECT min(seq) FROM outbox) "
            "THEN 'retrying' ELSE 'waiting' END, 0, now(), NULL FROM outbox WHERE aggregate_id = 'guilty'"
        )
    for _ in range(2):
        # First with the other one, then alone.
        assert _run(outbox) == -signal.SIGKILL
    write(outbox, ("other", {"n": 1}), ("guilty", {"n": 2}))
    for _ in range(2):
        ended = outbox.outbox("relay", "--until-empty", OUTBOX_RETRY_SECONDS="1000")
        print(ended.stderr)
        assert ended.returncode == 1
        assert "a relay crashed while it tried 1 of them" in ended.stderr
        assert "dead letter" in ended.stderr
    assert numbers(outbox, "other") == [0, 1], "other aggregates go on"
    assert _paused(outbox) == [(2, False)]


def test_a_lost_session_is_no_crash_and_forgets_none(outbox: Outbox) -> None:
    """Guards against a process that starts over on a busy machine, and forgets what others crashed at."""
    with outbox.connect() as connection:

        def take(owner: str) -> tuple[int, int | None, int, bool]:
            shard = Shard(outbox.settings, 0, owner)
            wait_until(shard.try_take)
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            return shard.crashes, shard.crash_guard_seq, shard.crash_guard_crashes, shard.predecessor_crashed

        assert take("a") == (0, None, 0, False)
        assert take("b") == (1, None, 0, True)
        connection.execute("UPDATE outbox_shards SET crash_guard_seq = 7, crash_guard_crashes = 1")
        assert take("b") == (1, 7, 1, False)
        assert take("c") == (2, 7, 2, True)
        connection.execute("UPDATE outbox_shards SET owner = NULL")
        assert take("c") == (0, None, 0, False)


def test_another_event_begins_its_own_count(outbox: Outbox) -> None:
    """Guards against an innocent that pays for the crashes at the event before it, or for an outage."""
    with outbox.connect() as connection:

        def crashes(seq: int | None) -> int:
            connection.execute(relay_sql.CRASH_GUARD, {"shard": 0, "epoch": 0, "seq": seq})
            ((found,),) = connection.execute("SELECT crash_guard_crashes FROM outbox_shards")
            return int(found)

        assert crashes(1) == 0
        connection.execute("UPDATE outbox_shards SET crash_guard_crashes = 2")
        assert crashes(1) == 2
        assert crashes(2) == 0
        connection.execute("UPDATE outbox_shards SET crash_guard_crashes = 2")
        assert crashes(None) == 0
        assert crashes(2) == 0


@pytest.mark.extended
def test_a_parked_event_that_waits_for_replicas_is_not_blamed_for_kills(outbox: Outbox) -> None:
    """Guards against an outage and an impatient orchestrator that make a dead letter of it (G4)."""
    write(outbox, ("a", {"n": 0}))
    with mock.running() as broker:
        broker.create({"order": outbox.topic()}, partitions=1)
        broker.answer(KafkaError.INVALID_RECORD, *[KafkaError.NOT_ENOUGH_REPLICAS] * 500)
        for _ in range(MAX_CRASHES):
            with relay(outbox, OUTBOX_LEASE_SECONDS="1", OUTBOX_KAFKA=broker.bootstrap):
                wait_until(lambda: _trying(outbox)[:1] == (True,), seconds=60, what="the event to be tried")
                due = _trying(outbox)[1]
                wait_until(lambda: _trying(outbox)[:1] == (False,), seconds=60, what="it to be cleared")
                assert _trying(outbox)[1] == due, "cleared by the end of the attempt only"
    with relay(outbox):
        wait_until(lambda: numbers(outbox, "a") == [0], seconds=60, what="the event to be published")


def _marks(connection: Connection) -> set[tuple[Any, ...]]:
    """The parked events that are being tried, and which statement marked them."""
    return set(connection.execute("SELECT seq, xmin::text FROM outbox_parked WHERE trying").fetchall())


def _marking(connection: Connection) -> set[tuple[Any, ...]]:
    """The sessions that have marked an event which is published alone."""
    return set(
        connection.execute(
            "SELECT pid, backend_start FROM pg_stat_activity "
            "WHERE datname = current_database() AND state = 'idle' "
            "AND application_name = 'outbox relay: crash_guard' AND query LIKE '%SET crash_guard_seq%'"
        ).fetchall()
    )


def _trying(outbox: Outbox) -> tuple[Any, ...]:
    """Whether the parked event is being tried, and when it was due."""
    with outbox.connect() as connection:
        return connection.execute("SELECT trying, next_attempt_at FROM outbox_parked").fetchone() or ()
