"""Servers that become unavailable and come back: no event is lost, none gets an attempt counted (G1, G4)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import psycopg
import pytest

from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core import flow, transactions
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.run import Totals
from tests.conftest import Outbox, either, patience, wait_until
from tests.history import business
from tests.history.writers import Writers
from tests.relay import faults
from tests.relay.parked import parked_rows, write
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import NOISE, change_topic


def _breaker(outbox: Outbox) -> str:
    return outbox_measurements.read(outbox.settings).shards[0].breaker


def _reason(outbox: Outbox) -> str:
    return outbox_measurements.read(outbox.settings).shards[0].breaker_reason or ""


def _wait_until_relayed(outbox: Outbox) -> int:
    """Wait until Kafka has all events; return how many of them were parked for a while.

    A broker that is busy may not know a topic for a moment: its events are parked, and with
    them those that follow, so that nothing is in flight to Kafka that would open the breaker.
    """
    wait_until(
        lambda: not outbox_measurements.read(outbox.settings).unpublished,
        seconds=60,
        what="no backlog",
    )
    parked = len(parked_rows(outbox))
    wait_until(lambda: parked_rows(outbox) == [], seconds=60, what="nothing parked")
    return parked


def _assert_all_arrived(outbox: Outbox, events: int) -> None:
    parked = _wait_until_relayed(outbox)
    found = len({message.headers["id"] for message in outbox.messages()})
    # Read again only to say whether they are lost or were seen too late.
    again = found if found == events else len({message.headers["id"] for message in outbox.messages()})
    assert found == events, f"{found} of {events}, {again} when read again; {parked} were parked"


def test_kafka_crashes_and_comes_back(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards against events in flight that are lost or overtaken (G1, G2), a relay that spins, grows or ends,
    and a transaction left open."""
    _, kafka, outbox = own_servers
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    published = faults.published(outbox)
    with faults.relay(outbox, OUTBOX_BREAKER_SECONDS="1") as relay:
        writers = Writers(outbox.settings.dsn, seed, 3)
        faults.wait_for_more(published, 50)
        kafka.kill()
        writers.stop()
        with outbox.connect() as connection:
            for _ in business.write_bulk(connection, random.Random(seed), 30_000, business.SMALL):
                pass
        wait_until(lambda: _breaker(outbox) == "open", seconds=60, what="the breaker to open")
        cpu, rss = _cpu_seconds(relay.pid), _rss_mb(relay.pid)
        at = time.monotonic()
        wait_until(lambda: time.monotonic() - at > 4)
        assert _cpu_seconds(relay.pid) - cpu < 0.3 * (time.monotonic() - at)
        assert _rss_mb(relay.pid) < rss + 20 < 250
        assert _oldest_transaction(outbox) < 4
        kafka.start()
        wait_until(lambda: _breaker(outbox) == "closed", seconds=60, what="the breaker to close")
        _wait_until_relayed(outbox)
        assert relay.poll() is None
    faults.verify(outbox)


def test_a_run_until_empty_ends_in_an_outage_also_after_a_crash(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a run that waits for ever for the acknowledgment of events that nothing may follow."""
    monkeypatch.setattr(flow, "OUTAGE_SECONDS", 0.5)

    def fails(self: IdempotentProducer, *_: object) -> None:
        raise UnavailableError("no broker answers")

    monkeypatch.setattr(IdempotentProducer, "_route", fails)
    outbox.write(1)
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET owner = 'died', crashes = 1")
    stop = threading.Event()
    late = threading.Timer(patience(20), stop.set)
    late.start()
    with pytest.raises(UnavailableError, match=r"^Kafka has accepted nothing for "):
        service.relay(quick(outbox), until_empty=True, stop=stop)
    late.cancel()


def test_kafka_is_frozen_for_a_while(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards against a broker whose connections stay open while nothing is answered."""
    _, kafka, outbox = own_servers
    with faults.relay(outbox, OUTBOX_BREAKER_SECONDS="1"):
        outbox.write(1)
        _wait_until_relayed(outbox)
        kafka.freeze()
        outbox.write(*range(10))
        wait_until(lambda: _breaker(outbox) == "open", what="the breaker to open")
        kafka.thaw()
        wait_until(lambda: _breaker(outbox) == "closed", seconds=60, what="the breaker to close")
        _assert_all_arrived(outbox, 11)


ONCE = {"delivery": "exactly_once", "transaction_seconds": 4.0}


def _epoch(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        ((epoch,),) = connection.execute("SELECT epoch FROM outbox_shards").fetchall()
    return int(epoch)


def _assert_waits_for_kafka(outbox: Outbox) -> None:
    (shard,) = outbox_measurements.read(outbox.settings).shards
    assert (shard.owner is not None, shard.breaker) == (True, "open"), shard
    assert shard.heartbeat_seconds is not None
    assert shard.heartbeat_seconds < outbox.settings.lease_seconds


@pytest.mark.extended
def test_a_transaction_in_doubt_keeps_the_shard_until_kafka_is_back(
    own_servers: tuple[Postgres, Kafka, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an outage shown as a relay that is missing, and against events published twice."""
    _, kafka, outbox = own_servers
    monkeypatch.setattr(transactions, "_ABORT_SECONDS", 1.0)
    # The abort that fails opens the breaker, long before its patience ends.
    with running(quick(outbox, **ONCE, breaker_seconds=600.0)):
        outbox.write(1)
        _wait_until_relayed(outbox)
        before = _epoch(outbox)
        kafka.freeze()
        outbox.write(*range(8))
        wait_until(lambda: _epoch(outbox) > before, seconds=60, what="the shard to be taken again")
        _assert_waits_for_kafka(outbox)
        assert "cannot be ended" in _reason(outbox)
        wait_until(lambda: "no broker" in _reason(outbox), seconds=60, what="an attempt to recover")
        _assert_waits_for_kafka(outbox)
        kafka.thaw()
        wait_until(lambda: _breaker(outbox) == "closed", seconds=60, what="the breaker to close")
        _assert_all_arrived(outbox, 9)
    assert len(outbox.messages()) == 9


@pytest.mark.parametrize(
    ("more", "is_shown"),
    either(({}, True), (ONCE, True), (ONCE, False)),
    ids=["at_least_once", "exactly_once", "exactly_once, before the outage is noticed"],
)
def test_a_successor_takes_the_shard_in_an_outage(
    own_servers: tuple[Postgres, Kafka, Outbox], more: dict[str, Any], is_shown: bool
) -> None:
    """Guards against an outage that is over in the status because the relay that noticed it has died."""
    _, kafka, outbox = own_servers
    environment = {f"OUTBOX_{name.upper()}": str(value) for name, value in more.items()}
    patience = {} if is_shown else {"breaker_seconds": 600.0}
    with faults.relay(outbox, OUTBOX_BREAKER_SECONDS="1", **environment) as first:
        outbox.write(1)
        _wait_until_relayed(outbox)
        before = _epoch(outbox)
        with running(quick(outbox, **more, **patience)):
            wait_until(
                lambda: outbox_measurements.read(outbox.settings).shards[0].successor_waits,
                seconds=60,
                what="a standby",
            )
            kafka.freeze()
            outbox.write(*range(8))
            if is_shown:
                wait_until(lambda: _breaker(outbox) == "open", seconds=60, what="the breaker to open")
            first.kill()
            wait_until(lambda: _epoch(outbox) > before, seconds=60, what="the successor")
            if not is_shown:
                wait_until(lambda: _breaker(outbox) == "open", seconds=60, what="the breaker to open")
            _assert_waits_for_kafka(outbox)
            kafka.thaw()
            wait_until(lambda: _breaker(outbox) == "closed", seconds=60, what="the breaker to close")
            _assert_all_arrived(outbox, 9)


@pytest.mark.extended
def test_the_database_restarts_while_kafka_is_unavailable(
    own_servers: tuple[Postgres, Kafka, Outbox],
) -> None:
    """Guards against a shard without a relay until Kafka is back."""
    postgres, kafka, outbox = own_servers
    with faults.relay(outbox, OUTBOX_BREAKER_SECONDS="1"):
        outbox.write(1)
        _wait_until_relayed(outbox)
        before = _epoch(outbox)
        kafka.freeze()
        outbox.write(*range(8))
        wait_until(lambda: _breaker(outbox) == "open", seconds=60, what="the breaker to open")
        postgres.stop()
        postgres.start()
        wait_until(lambda: _epoch(outbox) > before, seconds=60, what="the shard to be taken again")
        _assert_waits_for_kafka(outbox)
        kafka.thaw()
        _assert_all_arrived(outbox, 9)


def test_a_relay_that_waits_for_the_database_can_be_stopped(
    own_servers: tuple[Postgres, Kafka, Outbox],
) -> None:
    """Guards against a service that ignores SIGTERM in an outage."""
    postgres, _, outbox = own_servers
    with faults.relay(outbox) as relay:
        outbox.write(1)
        _wait_until_relayed(outbox)
        postgres.stop()
        at = time.monotonic()
        wait_until(lambda: time.monotonic() - at > 2)
        assert relay.poll() is None
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(patience(20)) in (0, 2)


def _oldest_transaction(outbox: Outbox) -> float:
    """Age of the oldest open transaction of the relay, in seconds."""
    with psycopg.connect(outbox.settings.dsn) as connection:
        row = connection.execute(
            "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 "
            "FROM pg_stat_activity WHERE application_name LIKE 'outbox relay%'"
        ).fetchone()
    assert row is not None
    return float(row[0])


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as lines:  # noqa: PTH123
        (line,) = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def test_an_outage_during_an_attempt_does_not_count(
    own_servers: tuple[Postgres, Kafka, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a dead letter made by an outage: what Kafka did not answer was not refused."""
    _, kafka, outbox = own_servers
    monkeypatch.setattr("outbox_pipelines.relay.parking.prober._PATIENCE_SECONDS", 0.5)
    change_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"noise": NOISE}))

    def row() -> tuple[object, ...]:
        with outbox.connect() as connection:
            query = "SELECT attempts, next_attempt_at, trying FROM outbox_parked"
            return connection.execute(query).fetchone() or (0, None, False)

    # A machine under load freezes a broker in seconds.
    with running(outbox.settings.model_copy(update={"retry_seconds": 5.0, "max_attempts": 2})):
        wait_until(lambda: row()[0] == 1, what="the first refusal")
        kafka.freeze()
        _, due, _ = row()
        wait_until(lambda: row()[1] != due, seconds=60, what="the end of the second attempt")
        assert row()[0] == 1
        kafka.thaw()
        wait_until(lambda: row()[0] == 2, seconds=60, what="the second refusal")
    assert parked_rows(outbox)[0][2:] == ("failed", 2)


def test_all_sessions_of_a_relay_are_counted(outbox: Outbox) -> None:
    """Guards against a last line that says 0 events, where a session was lost in between."""
    stop, found = threading.Event(), list[Totals]()
    relay = threading.Thread(target=lambda: found.append(service.relay(quick(outbox), stop=stop)))
    relay.start()
    try:
        for key in "ab":
            outbox.write(key)
            wait_until_relayed(outbox)
            with outbox.connect() as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
    finally:
        stop.set()
        relay.join(600)
    assert [totals.events for totals in found] == [2]
