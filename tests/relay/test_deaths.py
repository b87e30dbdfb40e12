"""Events that kill the process: found, and given up, without a commit for each event (G3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_pipelines.relay import queries, service
from outbox_pipelines.relay.retries import DEATHS
from outbox_pipelines.relay.shards import Shard
from tests.conftest import Outbox, clean_environment, wait_until
from tests.history import mock
from tests.relay.faults import relay
from tests.relay.parked import numbers, parked_rows, write

# A relay whose encoder crashes the process at a payload with "deadly" in it, as a fault in a C library would.
RELAY = """
import os, signal, sys
from outbox_pipelines.relay import encoding
plain = encoding._plain
def deadly(names):
    encode = plain(names)
    def crashing(event):
        if '"deadly"' in event.payload:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(event)
    return crashing
encoding._plain = deadly
from outbox_pipelines.__main__ import main
sys.argv = ["outbox", "relay", "--until-empty"]
main()
"""

# The same at the moment at which the content has been read, as where there is too little memory for it.
READER = """
import os, signal, sys
from outbox_pipelines.relay import source
weigh = source.weigh
def deadly(events):
    events = list(events)
    if any('"deadly"' in (event.payload or "") for event in events):
        os.kill(os.getpid(), signal.SIGKILL)
    return weigh(events)
source.weigh = deadly
from outbox_pipelines.__main__ import main
sys.argv = ["outbox", "relay", "--until-empty"]
main()
"""


def _run(outbox: Outbox, program: str = RELAY, **environment: str) -> int:
    given = clean_environment() | outbox.environment | environment
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=given, capture_output=True, timeout=120).returncode


def _run_until_it_lives(outbox: Outbox, program: str = RELAY, **environment: str) -> int:
    deaths = 0
    while (code := _run(outbox, program, **environment)) == -signal.SIGKILL:
        deaths += 1
        assert deaths < 12, "the relay dies for ever"
    assert code in (0, 1)
    return deaths


@pytest.mark.parametrize(("events", "at"), [(1, 0), (3000, 1234)])
def test_an_event_that_kills_is_found_and_given_up(outbox: Outbox, events: int, at: int) -> None:
    """Guards against a crash loop for ever, and against blaming an innocent."""
    payloads: list[tuple[str, Any]] = [(str(n % 50), {"n": n}) for n in range(events)]
    payloads[at] = ("guilty", {"n": at, "deadly": True})
    ids = write(outbox, *payloads, ("guilty", {"n": events}))
    assert _run_until_it_lives(outbox) <= 6
    assert parked_rows(outbox) == [("guilty", ids[at], "failed", 0)]
    assert len({message.headers["id"] for message in outbox.messages()}) == events
    assert numbers(outbox, "guilty") == [events]
    with outbox.connect() as connection:
        row = connection.execute(
            "SELECT s.deaths, suspect, suspect_deaths, last_error FROM outbox_shards s, outbox_parked"
        ).fetchone()
    assert row is not None
    assert row[:3] == (0, None, 0)
    assert "died 3 times" in row[3]


def test_an_event_that_kills_when_it_is_read_is_given_up(outbox: Outbox) -> None:
    """Guards against a crash loop at a row that is marked only after its content was read."""
    payloads: list[tuple[str, Any]] = [(str(n % 50), {"n": n}) for n in range(1000)]
    payloads[434] = ("guilty", {"n": 434, "deadly": True})
    ids = write(outbox, *payloads)
    assert _run_until_it_lives(outbox, READER) <= 6
    assert parked_rows(outbox) == [("guilty", ids[434], "failed", 0)]
    assert len({message.headers["id"] for message in outbox.messages()}) == 999


def test_deaths_count_in_a_container_restarted_in_place(outbox: Outbox) -> None:
    """Guards against a crash loop where every process has the same host name and process id."""
    write(outbox, ("guilty", {"deadly": True}), ("other", {"n": 0}))
    in_place = "import os; own = os.getpid(); os.getpid = lambda: 7" + RELAY.replace("os.getpid()", "own")
    given = clean_environment() | outbox.environment
    for _ in range(2):
        died = subprocess.run([sys.executable, "-c", in_place], env=given, capture_output=True, timeout=60)
        assert died.returncode == -signal.SIGKILL
        with outbox.connect() as connection:
            ((owner,),) = connection.execute("SELECT owner FROM outbox_shards").fetchall()
            assert ":7:" in owner
    with outbox.connect() as connection:
        assert connection.execute("SELECT deaths FROM outbox_shards").fetchone() == (1,)


def test_a_replayed_event_that_kills_is_given_up_again(outbox: Outbox) -> None:
    """Guards against an operator's replay that brings the crash loop back."""
    ids = write(outbox, ("guilty", {"n": 0, "deadly": True}), ("other", {"n": 0}))
    _run_until_it_lives(outbox)
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_parked SET state = 'replaying', next_attempt_at = NULL")
    assert _run_until_it_lives(outbox) <= 4
    assert parked_rows(outbox)[0][:3] == ("guilty", ids[0], "failed")


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
    assert error == "the relay died 3 times while this event was being published"
    # Once by the first drain, once as a parked event; of a run that was on its way at the death, again.
    again = numbers(outbox, "a")[20:]
    first = list(dict.fromkeys(again))
    assert first == [n for n in range(20) if n != 12]


def test_kills_from_outside_blame_nobody(outbox: Outbox) -> None:
    """Guards against dead letters made by an operator's kill -9, or by an orchestrator in an outage."""
    outbox.fill(20_000)
    for n in range(12):
        process = subprocess.Popen(
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
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
    service.relay(outbox.settings, until_empty=True)
    assert parked_rows(outbox) == []
    assert len({message.headers["id"] for message in outbox.messages()}) == 20_000


def test_a_lost_session_is_no_death_and_forgets_none(outbox: Outbox) -> None:
    """Guards against a process that starts over on a busy machine, and forgets what others have died of."""
    with outbox.connect() as connection:

        def take(owner: str) -> tuple[int, int | None, int, bool]:
            shard = Shard(outbox.settings, 0, owner)
            wait_until(shard.try_take)
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            return shard.deaths, shard.suspect, shard.suspect_deaths, shard.predecessor_died

        assert take("a") == (0, None, 0, False)
        assert take("b") == (1, None, 0, True)
        connection.execute("UPDATE outbox_shards SET suspect = 7, suspect_deaths = 1")
        assert take("b") == (1, 7, 1, False)
        assert take("c") == (2, 7, 2, True)
        connection.execute("UPDATE outbox_shards SET owner = NULL")
        assert take("c") == (0, None, 0, False)


def test_another_event_begins_its_own_count(outbox: Outbox) -> None:
    """Guards against an innocent that pays for the deaths at the event before it, or for an outage."""
    with outbox.connect() as connection:

        def deaths(seq: int | None) -> int:
            connection.execute(queries.SUSPECT, {"shard": 0, "epoch": 0, "seq": seq})
            ((found,),) = connection.execute("SELECT suspect_deaths FROM outbox_shards")
            return int(found)

        assert deaths(1) == 0
        connection.execute("UPDATE outbox_shards SET suspect_deaths = 2")
        assert deaths(1) == 2
        assert deaths(2) == 0
        connection.execute("UPDATE outbox_shards SET suspect_deaths = 2")
        assert deaths(None) == 0
        assert deaths(2) == 0


def test_a_parked_event_that_waits_for_replicas_is_not_blamed_for_kills(outbox: Outbox) -> None:
    """Guards against an outage and an impatient orchestrator that make a dead letter of it (G4)."""
    write(outbox, ("a", {"n": 0}))
    with mock.running() as broker:
        broker.create({"order": outbox.topic()}, partitions=1)
        broker.answer(KafkaError.INVALID_RECORD, *[KafkaError.NOT_ENOUGH_REPLICAS] * 500)
        for _ in range(DEATHS):
            with relay(outbox, OUTBOX_LEASE_SECONDS="1", OUTBOX_KAFKA=broker.bootstrap):
                wait_until(lambda: _trying(outbox)[:1] == (True,), seconds=60, what="the event to be tried")
                due = _trying(outbox)[1]
                wait_until(lambda: _trying(outbox)[:1] == (False,), seconds=60, what="it to be cleared")
                assert _trying(outbox)[1] == due, "cleared by the end of the attempt only"
    with relay(outbox):
        wait_until(lambda: numbers(outbox, "a") == [0], seconds=60, what="the event to be published")


def _trying(outbox: Outbox) -> tuple[Any, ...]:
    """Whether the parked event is being tried, and when it was due."""
    with outbox.connect() as connection:
        return connection.execute("SELECT trying, next_attempt_at FROM outbox_parked").fetchone() or ()
