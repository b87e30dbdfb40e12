"""Several outboxes in one process, and several such processes (real PostgreSQL and Kafka)."""

from __future__ import annotations

import threading
import urllib.request
from contextlib import ExitStack

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from outbox_pipelines.relay.fleet import watch
from outbox_pipelines.relay.lease.owner_session import beating
from outbox_pipelines.relay.lease.shard import Shard
from tests.conftest import Outbox, wait_until
from tests.fleet.conftest import fleet
from tests.relay.threads import owners


def _keys(outbox: Outbox) -> list[str]:
    return [message.key for message in outbox.messages()]


def _wait_for(outbox: Outbox, *keys: str, seconds: float = 30.0) -> None:
    wait_until(lambda: _keys(outbox) == list(keys), seconds=seconds, what=f"{keys} in Kafka")


def _owners(outboxes: list[Outbox]) -> list[str | None]:
    return [owner for outbox in outboxes for owner in owners(outbox)]


def test_each_outbox_is_relayed(outboxes: list[Outbox]) -> None:
    """Guards against events that reach another outbox's topic, and against a commit that is not noticed."""
    for n, outbox in enumerate(outboxes):
        outbox.write(f"early {n}")
    with fleet(outboxes) as totals:
        for n, outbox in enumerate(outboxes):
            _wait_for(outbox, f"early {n}")
        first = outboxes[0]
        with first.connect(autocommit=False) as late:
            late.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES ('order', 'late', 'order.placed', '{}')"
            )
            first.write("in between")
            _wait_for(first, "early 0", "in between")
        _wait_for(first, "early 0", "in between", "late")
        # An outbox in which nothing is written any more.
        with outboxes[1].connect() as connection:
            connection.execute(
                "SELECT outbox_emit('order', 'delayed', 'e', '{}', deliver_after => now() + interval '1 s')"
            )
        _wait_for(outboxes[1], "early 1", "delayed")
    assert totals.events == 6
    assert _owners(outboxes) == [None, None, None]


def test_news_wakes_the_reader(outboxes: list[Outbox], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an outbox that is read only because its reader looks from time to time."""
    monkeypatch.setattr(watch, "LONGEST", 600.0)
    with fleet(outboxes):
        for outbox in outboxes:
            outbox.write("a")
            _wait_for(outbox, "a")
        for outbox in outboxes:
            with outbox.connect(autocommit=False) as late:
                late.execute(
                    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                    "VALUES ('order', 'late', 'order.placed', '{}')"
                )
                outbox.write("b")
                _wait_for(outbox, "a", "b")
            _wait_for(outbox, "a", "b", "late")


def test_one_that_cannot_be_relayed_does_not_stop_the_others(
    outboxes: list[Outbox], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a missing table or a database that is away, which concerns all outboxes."""
    absent, away, sound = outboxes
    with absent.connect() as connection:
        connection.execute("ALTER TABLE outbox_shards RENAME TO elsewhere")
    database = away.settings.dsn.reveal().split("dbname=")[1].split()[0]
    with psycopg.connect(sound.settings.dsn.reveal(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false".encode())
        with fleet(outboxes):
            sound.write("a")
            _wait_for(sound, "a")
            wait_until(lambda: len(_errors(caplog)) >= 2, what="a line for each")
            admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true".encode())
            with absent.connect() as connection:
                connection.execute("ALTER TABLE elsewhere RENAME TO outbox_shards")
            for outbox in (absent, away):
                outbox.write("b")
                _wait_for(outbox, "b")
    said = _errors(caplog)
    assert len(said) == 4, "each is said once, and so is its end"
    assert said.count("relaying again") == 2


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message for record in caplog.records if record.name == "outbox_pipelines.relay.fleet.member"
    ]


def test_an_outbox_that_loses_its_position_is_named(
    outboxes: list[Outbox], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an outbox without a shard that counts as wholly relayed, in silence."""
    emptied, sound = outboxes[:2]
    with fleet([emptied, sound]):
        for outbox in (emptied, sound):
            outbox.write("a")
            _wait_for(outbox, "a")
        with emptied.connect() as connection:
            connection.execute("DELETE FROM outbox_shards")
        wait_until(lambda: any("lacks rows of outbox_shards" in line for line in _errors(caplog)))
        sound.write("b")
        _wait_for(sound, "a", "b")


def test_none_is_an_error(outboxes: list[Outbox]) -> None:
    """Guards against a process that runs for ever and relays nothing."""
    for outbox in outboxes:
        with outbox.connect() as connection:
            connection.execute("ALTER TABLE outbox_shards RENAME TO elsewhere")
    with pytest.raises(SetupError, match="none of the outboxes"), fleet(outboxes, ends=True):
        pass


def test_two_processes_divide_the_outboxes(outboxes: list[Outbox]) -> None:
    """Guards against a process that keeps everything, and outboxes that the rest does not take over."""
    with fleet(outboxes, "one"):
        wait_until(lambda: _owners(outboxes) == ["one"] * 3, what="one process to own all")
        with fleet(outboxes, "two"):
            # Either may have two: a slow taker is taken for absent, and its outbox counts for both a moment.
            wait_until(lambda: {*_owners(outboxes)} == {"one", "two"}, what="a division")
            for outbox in outboxes:
                outbox.write("a")
                _wait_for(outbox, "a")
        wait_until(lambda: _owners(outboxes) == ["one"] * 3, what="one process to own all again")
        for outbox in outboxes:
            outbox.write("b")
            _wait_for(outbox, "a", "b")


def test_a_process_that_stands_by_reports_every_outbox(outboxes: list[Outbox]) -> None:
    """Guards against alerts that vanish, or fire, because the owners of all shards serve no metrics."""
    names = {outbox.settings.name for outbox in outboxes}
    of_the_database = ("database_up", "dead_letters", "unpublished_events", "check_status")
    urls: list[str] = []

    def reported(metric: str) -> set[str]:
        with urllib.request.urlopen(urls[0], timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        samples = [line for line in lines if line.startswith(f"outbox_{metric}{{")]
        return {name for name in names for line in samples if f'outbox="{name}"' in line}

    def are_there() -> bool:
        return bool(urls) and all(reported(metric) == names for metric in of_the_database)

    with ExitStack() as owning:
        for outbox in outboxes:
            place = Shard(outbox.settings, 0, "another")
            owning.callback(place.close)
            assert place.try_take()
            owning.enter_context(beating(place.beat, outbox.settings.lease_seconds / 5))
        with fleet(outboxes, "two", metrics_port=0, on_serve=urls.append):
            wait_until(are_there, what="the metrics of all outboxes")
            assert _owners(outboxes) == ["another"] * 3
            assert reported("shard_owned") == set()


def test_an_outbox_gets_a_process_of_its_own(outboxes: list[Outbox]) -> None:
    """Guards against a busy outbox that cannot be taken out of a fleet, and does not come back."""
    busy = outboxes[1]
    with fleet(outboxes, "fleet"):
        wait_until(lambda: _owners(outboxes) == ["fleet"] * 3, what="the fleet to own all")
        stop = threading.Event()
        own = threading.Thread(
            target=service.relay, args=[busy.settings], kwargs={"owner": "own", "stop": stop}
        )
        own.start()
        try:
            wait_until(lambda: _owners(outboxes) == ["fleet", "own", "fleet"], what="the hand-over")
            busy.write("a")
            _wait_for(busy, "a")
        finally:
            stop.set()
            own.join(600)
        wait_until(lambda: _owners(outboxes) == ["fleet"] * 3, what="the fleet to take it back")
