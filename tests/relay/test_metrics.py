"""The metrics, scraped over HTTP as Prometheus does: true, and there when a server is not."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.quality.measurements import Measurements
from outbox_pipelines.relay import append_only, service
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.lease.shard import Settled, Shard
from outbox_pipelines.relay.telemetry import exporter, metrics
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.writer import emit
from tests.conftest import EITHER_DELIVERY, Lasting, Outbox, command, patience, wait_until
from tests.history.servers import lasting_servers
from tests.relay import faults
from tests.relay.topic import NOISE, create_topic

# By name and labels: "outbox_published_total", "outbox_shard_owned 0".
Samples = dict[str, float]

OF_THE_DATABASE = {
    "outbox_unpublished_events 0",
    "outbox_oldest_unpublished_age_seconds 0",
    "outbox_parked_events",
    "outbox_dead_letters",
    "outbox_partitions_ahead",
    "outbox_partitions_detached",
    "outbox_partitions_late close",
    "outbox_partitions_late archive",
    "outbox_partitions_late drop",
}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def _scrape(url: str) -> Samples:
    return {
        " ".join([sample.name, *(value for name, value in sample.labels.items() if name != "outbox")]): (
            sample.value
        )
        for family in text_string_to_metric_families(_get(url))
        for sample in family.samples
    }


def _wait_for(url: str, seconds: float = 30.0, **expected: float) -> Samples:
    """Scrapes until these have these values; of shard 0, where they have a shard."""
    found: Samples = {}

    def are_there() -> bool:
        found.clear()
        found.update(_scrape(url))
        return all(found.get(name, found.get(f"{name} 0")) == value for name, value in expected.items())

    try:
        wait_until(are_there, seconds=seconds, what=str(expected))
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from None
    return found


@contextmanager
def _relay(outbox: Outbox, *arguments: str, **environment: str) -> Iterator[str]:
    """A running relay's URL."""
    given = command("relay", "--metrics-port", "0", *arguments)
    with faults.process(given, outbox.environment | environment) as process:
        yield _url(process)


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("metrics at http://127.0.0.1:"), line
    return line.split()[-1]


def _elsewhere(outbox: Outbox) -> psycopg.Connection[tuple[object, ...]]:
    """A session in another database of the same server."""
    return psycopg.connect(outbox.settings.dsn, dbname="postgres", autocommit=True)


def test_a_relay_says_what_it_does(outbox: Outbox) -> None:
    """Guards against metrics that are never counted, or counted twice."""
    # Events whose topic a busy broker is slow to make are parked, and come in no batch.
    create_topic(outbox)
    outbox.fill(6_000)
    with _relay(outbox) as url:
        found = _wait_for(url, outbox_published_total=6_000, outbox_unpublished_events=0)
        # Of the settle that a scrape may have come in the midst of.
        found = _wait_for(url, outbox_batch_events_sum=6_000)
    assert found["outbox_batch_events_count 0"] >= 2
    assert found["outbox_publish_seconds_count 0"] == found["outbox_batch_events_count 0"]
    assert 0 < found["outbox_publish_seconds_sum 0"] < 60
    assert found["outbox_settle_seconds_count 0"] >= 1
    assert found["outbox_settle_seconds_sum 0"] > 0
    assert 0 < found["outbox_latency_seconds 0"] < 60
    assert found["outbox_shard_owned 0"] == 1
    assert found["outbox_breaker_state 0"] == 0
    assert found["outbox_dead_lettered_total 0"] == 0
    assert found["outbox_database_up"] == 1
    assert found["outbox_oldest_unpublished_age_seconds 0"] == 0
    assert found["outbox_parked_events"] == found["outbox_dead_letters"] == 0
    assert found["outbox_partitions_ahead"] == 14


def test_a_standby_knows_the_backlog_and_claims_no_shard(outbox: Outbox) -> None:
    """Guards against a backlog that only the owner would tell of, and against two owners of one shard."""
    place = Shard(outbox.settings, 0, "another")
    assert place.try_take()
    outbox.write(1, 2, 3)
    with _relay(outbox) as url:
        found = _wait_for(url, outbox_unpublished_events=3)
        assert found["outbox_oldest_unpublished_age_seconds 0"] > 0
        assert "outbox_shard_owned 0" not in found
        place.close()
        _wait_for(url, outbox_shard_owned=1, outbox_published_total=3)


def test_a_relay_is_healthy_and_ready_through_an_outage(outbox: Outbox) -> None:
    """Guards against supervisors that replace a relay because a server is unavailable."""

    def status(url: str, path: str) -> int:
        try:
            with urllib.request.urlopen(url.replace("/metrics", path), timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with exporter.serving(outbox.settings, 0) as (_, url):
        # Nothing has reached a server.
        assert (status(url, "/healthz"), status(url, "/readyz")) == (200, 503)
    with _relay(outbox) as first, _relay(outbox) as second:
        for url in (first, second):
            wait_until(partial(_is_ready, status, url), seconds=60, what="a ready relay")
            assert _scrape(url)["process_resident_memory_bytes"] > 1e6
        _wait_for(first, outbox_configured=1, outbox_shard_standby=1)
        with _elsewhere(outbox) as admin, outbox.connect() as connection:
            name = connection.info.dbname
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
            try:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
                )
                _wait_for(first, outbox_database_up=0, outbox_configured=1)
                assert (status(first, "/healthz"), status(first, "/readyz")) == (200, 200)
            finally:
                admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())


def _is_ready(status: Callable[[str, str], int], url: str) -> bool:
    return status(url, "/readyz") == 200


@pytest.mark.extended
def test_rejections_are_counted_by_their_reason(outbox: Outbox) -> None:
    """Guards against poisoned events that no alert can see."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {"noise": NOISE})
        emit(connection, "order", 1, "order.placed", {"n": 1})
    retry = {"OUTBOX_RETRY_SECONDS": "60"}
    with _relay(outbox, **retry) as url:
        found = _wait_for(url, outbox_parked_events=2)
        found = _wait_for(url, **{"outbox_rejected_total MSG_SIZE_TOO_LARGE 0": 1})
        assert found["outbox_dead_lettered_total 0"] == found["outbox_dead_letters"] == 0
        assert found["outbox_published_total 0"] == 0
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp()")
    with _relay(outbox, OUTBOX_MAX_ATTEMPTS="2", **retry) as url:
        found = _wait_for(url, outbox_dead_letters=1, outbox_parked_events=0, outbox_published_total=1)
        assert found["outbox_dead_lettered_total 0"] == 1
        assert found["outbox_rejected_total MSG_SIZE_TOO_LARGE 0"] == 1


@pytest.mark.extended
def test_an_unavailable_database_fails_no_scrape(outbox: Outbox) -> None:
    """Guards against blindness, or yesterday's backlog, just when something is wrong."""
    name = psycopg.conninfo.conninfo_to_dict(outbox.settings.dsn)["dbname"]
    outbox.write(1)
    with _relay(outbox) as url, _elsewhere(outbox) as admin:
        found = _wait_for(url, outbox_database_up=1, outbox_shard_owned=1, outbox_published_total=1)
        assert found.keys() >= OF_THE_DATABASE
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        found = _wait_for(url, outbox_database_up=0, outbox_shard_owned=0)
        assert not found.keys() & OF_THE_DATABASE
        assert not found.keys() & {"outbox_latency_seconds 0", "outbox_breaker_state 0"}
        assert found["outbox_published_total 0"] == 1
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
        found = _wait_for(url, outbox_database_up=1, outbox_shard_owned=1)
        assert found.keys() >= OF_THE_DATABASE


def test_a_database_that_hangs_holds_no_scrape_up(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against scrapes that time out behind a lock of another session."""
    monkeypatch.setattr(exporter, "PATIENCE", 0.2)
    with exporter.serving(outbox.settings, 0) as (_, url), outbox.connect(autocommit=False) as locking:
        locking.execute("LOCK TABLE outbox_shards")
        begun = time.monotonic()
        found = _scrape(url)
        assert found["outbox_database_up"] == 0
        assert not found.keys() & OF_THE_DATABASE
        assert time.monotonic() - begun < patience(2)
        locking.rollback()
        _wait_for(url, outbox_database_up=1, outbox_unpublished_events=0)


def test_an_answer_is_not_kept_behind_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against old values with `outbox_database_up` 1, for as long as the error lasts."""
    answers = iter([cast(Measurements, object())])
    monkeypatch.setattr(append_only, "measure", lambda settings: next(answers))
    reading = exporter.Reading(load_settings())
    reading._ask()
    with pytest.raises(StopIteration):
        reading._ask()
    assert reading.wait(0) is None


def test_many_scrapes_cost_one_read(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against dashboards that load the database."""
    read, reads = append_only.measure, []

    def counted(settings: Settings) -> Measurements:
        reads.append(settings)
        return read(settings)

    monkeypatch.setattr(exporter, "FRESH", 3600.0)
    monkeypatch.setattr(append_only, "measure", counted)
    with exporter.serving(outbox.settings, 0) as (_, url):
        for _ in range(5):
            assert _scrape(url)["outbox_database_up"] == 1
    assert len(reads) == 1


def test_an_open_breaker_shows(
    own_servers: tuple[Postgres, Kafka, Outbox],
    lasting: Lasting,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Guards against an outage of Kafka that looks like a relay with nothing to do."""
    _, _, outbox = own_servers
    outbox.write(1)
    with lasting_servers(lasting, tmp_path_factory) as servers:
        to_kafka = servers.kafka_proxy
        with _relay(outbox, OUTBOX_KAFKA=servers.bootstrap_of_relays, OUTBOX_BREAKER_SECONDS="0.5") as url:
            _wait_for(url, outbox_published_total=1, outbox_breaker_state=0)
            to_kafka.refuse()
            try:
                to_kafka.cut()
                outbox.write(2)
                found = _wait_for(url, outbox_breaker_state=2, outbox_unpublished_events=1)
                assert found["outbox_shard_owned 0"] == 1
            finally:
                to_kafka.heal()
            _wait_for(url, seconds=60, outbox_breaker_state=0, outbox_published_total=2)


def test_the_documented_metrics_are_those_that_are_served(outbox: Outbox) -> None:
    """Guards against a page that lies: names, types, labels and meanings."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    rows = re.findall(r"- `(outbox_\w+?)(?:\{([\w, ]+)\})?`: (histogram: )?(.+)\n", page)
    documented = {
        name: (
            "histogram" if histogram else "counter" if name.endswith("_total") else "gauge",
            {*re.findall(r"\w+", labels), *(() if name == "outbox_build_info" else ("outbox",))},
            meaning,
        )
        for name, labels, histogram, meaning in rows
        if not name.startswith("outbox_consumer_")
    }
    with exporter.serving(outbox.settings, 0) as (counting, url):
        counting.took(0)
        counting.rejected(["CODE: for some reason"])
        counting.settled(1, 0.1, Settled(1, 0.5))
        served = {}
        for family in text_string_to_metric_families(_get(url)):
            if family.name.startswith("process_"):
                continue
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {*family.samples[0].labels} if family.samples else {"outbox", "shard"}
            served[name] = (family.type, labels - {"le"}, family.documentation)
    assert served == documented


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_a_run_until_empty_counts_and_gives_the_shard_back(outbox: Outbox, delivery: str) -> None:
    """Guards against a process that claims a shard, or knows its latency, after it has given it back."""
    outbox.fill(100)
    settings = outbox.settings.model_copy(update={"delivery": delivery})
    with exporter.serving(settings, 0) as (counting, url):
        service.relay(settings, until_empty=True, metrics=counting)
        found = _scrape(url)
        assert (found["outbox_published_total 0"], found["outbox_shard_owned 0"]) == (100, 0)
        assert found["outbox_batch_events_sum 0"] == 100
        assert not found.keys() & {"outbox_latency_seconds 0", "outbox_breaker_state 0"}
        service.relay(settings, until_empty=True, metrics=counting)
        assert _scrape(url)["outbox_published_total 0"] == 100


@pytest.mark.parametrize(("state", "number"), [("closed", 0), ("half-open", 1), ("open", 2)])
def test_each_state_of_the_breaker_has_its_number(outbox: Outbox, state: str, number: int) -> None:
    """Guards against an alert on a number that means something else."""
    with exporter.serving(outbox.settings, 0) as (counting, url):
        counting.took(3)
        counting.breaker(State(state))
        assert _scrape(url)["outbox_breaker_state 3"] == number


def test_metrics_are_served_only_on_request(outbox: Outbox) -> None:
    """Guards against a cost, and a port, that were not asked for."""
    with metrics.serving(outbox.settings, pytest.fail) as counting:
        assert type(counting) is Metrics


def test_a_port_that_is_taken_is_one_line(outbox: Outbox) -> None:
    """Guards against a traceback, and against a relay that runs unobserved."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, environment in (
            (("--metrics-port", port), {}),
            ((), {"OUTBOX_METRICS_PORT": port}),
        ):
            done = outbox.outbox("relay", *arguments, **environment)
            assert done.returncode == 2
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"outbox: OUTBOX_METRICS_PORT={port}: cannot listen on 127.0.0.1")
            assert "set a free port" in line


def test_an_address_that_is_none_is_one_line(outbox: Outbox) -> None:
    """Guards against a traceback from the resolver."""
    done = outbox.outbox("relay", "--metrics-port", "0", OUTBOX_METRICS_ADDRESS="203.0.113.1")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot listen on 203.0.113.1" in line
    assert "OUTBOX_METRICS_PORT=70000" in outbox.outbox("relay", OUTBOX_METRICS_PORT="70000").stderr
