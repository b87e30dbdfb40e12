"""A relay that starts while a server is unavailable: it waits, unless waiting does not help."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from outbox_pipelines.core.outages import is_refused
from outbox_pipelines.errors import RefusedError, UnavailableError
from outbox_pipelines.quality.measurements import ShardStatus
from outbox_pipelines.relay import kinds, service
from outbox_pipelines.relay.shared import Threads
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox, either, wait_until
from tests.existing.conftest import make_table as make_table
from tests.existing.conftest import table as table
from tests.existing.textbook import Table
from tests.history.proxy import Proxy
from tests.relay.threads import running


def _through(outbox: Outbox, server: str, proxy: Proxy) -> Settings:
    if server == "Kafka":
        return outbox.settings.model_copy(update={"kafka": f"127.0.0.1:{proxy.port}"})
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.require_dsn(), host="127.0.0.1", port=proxy.port)
    return outbox.settings.model_copy(update={"dsn": dsn})


@pytest.fixture(params=["PostgreSQL", "Kafka"])
def unavailable(request: pytest.FixtureRequest, outbox: Outbox) -> Iterator[tuple[Proxy, Settings]]:
    """A server that refuses connections, and settings that lead to it."""
    if request.param == "Kafka":
        port = int(outbox.settings.kafka.rpartition(":")[2])
    else:
        port = int(str(psycopg.conninfo.conninfo_to_dict(outbox.settings.require_dsn())["port"]))
    with Proxy(port) as proxy:
        proxy.refuse()
        yield proxy, _through(outbox, request.param, proxy)


@pytest.mark.parametrize("unavailable", ["PostgreSQL"], indirect=True)
def test_it_waits_for_the_database(
    outbox: Outbox, unavailable: tuple[Proxy, Settings], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a service that its supervisor starts again minutes after the server is back."""
    proxy, settings = unavailable
    outbox.write("a")
    with caplog.at_level(logging.WARNING), running(settings):
        wait_until(lambda: "starting over" in caplog.text)
        seen = proxy.refused
        wait_until(lambda: proxy.refused >= seen + 6)
        proxy.heal()
        wait_until(lambda: len(outbox.messages()) == 1)
    said = [record.getMessage() for record in caplog.records if record.name == service.__name__]
    assert [text.partition(":")[0] for text in said] == ["starting over", said[-1]]
    assert said[-1].startswith("relaying again after ")


@pytest.mark.parametrize("unavailable", ["Kafka"], indirect=True)
@pytest.mark.parametrize("how", either("exactly_once", "at_least_once", "existing table"))
def test_it_waits_for_kafka_as_the_owner(
    outbox: Outbox,
    table: Table,
    unavailable: tuple[Proxy, Settings],
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against an outage that is shown as a relay that is missing."""
    proxy, settings = unavailable
    place = table if how == "existing table" else outbox
    more = {"delivery": "exactly_once"} if how == "exactly_once" else {}
    settings = place.settings.model_copy(update={"kafka": settings.kafka, "breaker_seconds": 1.0, **more})

    def shard() -> ShardStatus:
        return kinds.of(settings).measure(settings).shards[0]

    with caplog.at_level(logging.WARNING), running(settings):
        wait_until(lambda: shard().owner is not None, what="an owner")
        place.fill(1)
        wait_until(lambda: shard().breaker == "open", what="the breaker to open")
        assert shard().owner is not None
        proxy.heal()
        wait_until(lambda: len(place.messages()) == 1)
        wait_until(lambda: shard().breaker == "closed", what="the breaker to close")
    said = [record.getMessage() for record in caplog.records if record.name == service.__name__]
    assert [text.partition(":")[0] for text in said] == ["waiting for Kafka"]


@pytest.mark.parametrize("how", either({"until_empty": True}, {"hand_over_after": 60.0}))
def test_runs_that_end_do_not_wait(unavailable: tuple[Proxy, Settings], how: dict[str, float]) -> None:
    """Guards against a job, or a session of Dagster, that waits instead of a report."""
    _, settings = unavailable
    with pytest.raises(UnavailableError):
        service.relay(settings, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"dbname": "absent"}, {"user": "absent"}])
def test_what_waiting_does_not_help(outbox: Outbox, wrong: dict[str, str]) -> None:
    """Guards against a relay with a wrong setting that waits without an error."""
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.require_dsn(), **wrong)
    with pytest.raises(RefusedError):
        service.relay(outbox.settings.model_copy(update={"dsn": dsn}))


def test_a_relay_of_which_a_part_cannot_begin_ends(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reader that goes on, and a client that stays, behind a relay that has failed."""
    begin = Threads.start

    def start(threads: Threads, body: Callable[[], None], name: str) -> threading.Thread:
        if name == "outbox-settler":
            readers = "SELECT FROM pg_stat_activity WHERE application_name LIKE '%reader%'"
            wait_until(lambda: outbox.rows(f"{readers} AND datname = current_database()"), what="the reader")
            raise RuntimeError("can't start new thread")
        return begin(threads, body, name)

    monkeypatch.setattr(Threads, "start", start)
    with pytest.raises(RuntimeError):
        service.relay(outbox.settings)
    assert "outbox-reader" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("text", "is_hopeless"),
    [
        ('FATAL:  password authentication failed for user "app"', True),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app", database "app"', True),
        ('FATAL:  database "app" does not exist', True),
        ('FATAL:  role "app" does not exist', True),
        ('FATAL:  role "app" is not permitted to log in', True),
        ("SSL error: certificate verify failed", True),
        ("FATAL:  the database system is starting up", False),
        ("FATAL:  sorry, too many clients already", False),
        # pgbouncer
        ("FATAL:  no such database: app", True),
        ("FATAL:  SASL authentication failed", True),
        ("FATAL:  query_wait_timeout", False),
        ("Connection refused", False),
        ('could not translate host name "db" to address: Temporary failure in name resolution', False),
    ],
)
def test_the_table_of_refusals(text: str, is_hopeless: bool) -> None:
    """Guards against a text of the server that is taken for the other kind."""
    assert is_refused(psycopg.OperationalError(f"connection failed: {text}")) is is_hopeless
