"""The metrics of a consumer, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outbox_pipelines.consumer import AsyncConsumer, Consumer, Counts, Event, RefusedError, deliveries
from outbox_pipelines.consumer.prometheus import MOST_TYPES, ConsumerCollector, serving
from tests import forks
from tests.conftest import clean_environment, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, effect, running, uuid7

Connection = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inbox is looked at more often than it need be."""
    monkeypatch.setattr(deliveries, "_MEASURE_SECONDS", 0.5)


def bare(source: str = "billing", kind: Any = Consumer) -> Any:
    return kind(source=source, topics=["t"], kafka={"bootstrap.servers": "broker:9092"}, dsn="")


def parsed(text: str) -> dict[str, float]:
    """Samples as `name label label`, without `outbox_consumer_` and without the source."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "source"]
            found[" ".join([sample.name.removeprefix("outbox_consumer_"), *labels])] = sample.value
    return found


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return parsed(answer.read().decode())


def test_what_is_served(place: Place) -> None:
    """Guards against metrics that say something else than what has happened."""
    place.load(30)
    place.send(uuid7(), type="order.seen")
    consumer = place.bare(retry_seconds=300)
    blocked, go_on = threading.Event(), threading.Event()

    @consumer.on("order.placed")
    def placed(event: Event, connection: Connection) -> None:
        if event.payload["n"] == 7:
            raise RefusedError("seven")
        if event.payload["n"] == 100:
            blocked.set()
            go_on.wait(600)
        effect(event, connection)

    consumer.on("order.plcaed")(lambda event, connection: None)
    with serving(consumer, 0) as url:
        assert scraped(url)["running"] == 0
        with running(consumer) as run:
            wait_until(lambda: place.uncommitted() == 0 and place.effects() == 29, what="all effects")
            wait_until(lambda: scraped(url).get("dead_letters") == 1, what="a look at the inbox", seconds=60)
            wait_until(lambda: sum(lag(scraped(url))) == 0 and lag(scraped(url)), what="no lag")
            found = scraped(url)
            assert found["running"] == 1
            assert found["handled_total"] == 29
            assert found["failures_total"] == found["dead_lettered_total"] == found["received_total"] == 1
            assert found["ignored_total order.seen"] == 1
            assert found["handler_seconds_count placed"] == 30
            assert found["handler_seconds_bucket placed +Inf"] == 30
            assert found["unmatched_type order.plcaed"] == 1
            assert found["inbox_waiting_events"] == 0
            place.load(50, first=100, keys=1)
            assert blocked.wait(600)
            wait_until(lambda: scraped(url)["progress_age_seconds"] > 1, what="a handler that hangs")
            go_on.set()
            wait_until(lambda: scraped(url)["handled_total"] == 79, what="all of them", seconds=60)
            run.end()
        found = scraped(url)
        assert (found["running"], found["handled_total"]) == (0, 79)
        assert "progress_age_seconds" not in found
        assert not lag(found)


def lag(found: dict[str, float]) -> list[float]:
    return [value for name, value in found.items() if name.startswith("lag_messages")]


@pytest.mark.extended
def test_a_handler_that_is_left_alone_and_an_inbox(place: Place) -> None:
    place.load(5)
    consumer = place.bare(retry_seconds=300, outage_after=2)
    works = threading.Event()

    @consumer.on("order.placed")
    def placed(event: Event, connection: Connection) -> None:
        if not works.is_set():
            raise ConnectionError

    with serving(consumer, 0) as url:
        with at_work(consumer, "receive") as run:
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            assert scraped(url)["received_total"] == 5
            run.end()
        with at_work(consumer, "drain") as run:
            wait_until(lambda: scraped(url).get("breaker_open placed") == 1, what="an outage", seconds=60)
            assert scraped(url)["outages_total"] == 1
            wait_until(lambda: scraped(url).get("inbox_waiting_events") == 5, what="its inbox", seconds=60)
            assert scraped(url)["inbox_oldest_age_seconds"] > 0
            works.set()
            wait_until(lambda: scraped(url)["handled_total"] == 5, what="the end of it", seconds=60)
            assert scraped(url)["breaker_open placed"] == 0
            run.end()


def test_labels_are_few() -> None:
    """Guards against a producer that fills Prometheus with names."""
    consumer = bare()
    consumer._counts = Counts(ignored=1501, ignored_types={f"type-{n}" * 50: 1 for n in range(1000)})
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(consumer))
    ignored = {
        name: value
        for name, value in parsed(generate_latest(registry).decode()).items()
        if name.startswith("ignored_total")
    }
    assert len(ignored) == MOST_TYPES + 1
    assert ignored["ignored_total (other)"] == 1501 - MOST_TYPES
    assert max(map(len, ignored)) < 120


def test_several_in_one_registry() -> None:
    """Guards against names that come twice, which Prometheus refuses."""
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(bare("one"), bare("two", AsyncConsumer)))
    text = generate_latest(registry).decode()
    assert text.count("# TYPE outbox_consumer_handled_total counter") == 1
    for source in "one", "two":
        assert f'outbox_consumer_handled_total{{source="{source}"}} 0.0' in text


def test_what_is_documented_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an example that fails."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    billing, registry = bare(), CollectorRegistry()
    served: list[str] = []
    monkeypatch.setattr(billing, "run", lambda: served.append(generate_latest(registry).decode()))
    client = SimpleNamespace(REGISTRY=registry)
    names = {"prometheus_client": client, "billing": billing, "shipping": bare("shipping")}
    exec(example.replace("9188", "0"), names)
    assert 'outbox_consumer_handled_total{source="shipping"} 0.0' in served[0]


def test_the_documented_metrics_are_those_that_are_served() -> None:
    """Guards against a page that lies: names, types, labels and meanings."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    rows = re.findall(r"- `(outbox_\w+?)(?:\{([\w, ]+)\})?`: (histogram: )?(.+)\n", page)
    documented = {
        name: (
            "histogram" if histogram else "counter" if name.endswith("_total") else "gauge",
            {*re.findall(r"\w+", labels), "source"},
            meaning,
        )
        for name, labels, histogram, meaning in rows
        if name.startswith("outbox_consumer_")
    }
    families: Any = ConsumerCollector(bare()).collect()
    served = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {*family._labelnames},
            family.documentation,
        )
        for family in families
        if not isinstance(family, str)
    }
    assert served == documented


@pytest.mark.extended
def test_the_asynchronous_one(place: Place) -> None:
    place.load(10)
    consumer = test_async.consumer(place, "connection")

    async def scenario() -> None:
        with serving(consumer, 0) as url:
            async with test_async.running(consumer.run):
                await test_async.until(lambda: scraped(url)["handled_total"] == 10, "all effects")
                await test_async.until(lambda: "dead_letters" in scraped(url), "a look at the inbox")

    asyncio.run(scenario())


def test_the_command_serves_them(place: Place, tmp_path: Path) -> None:
    place.load(5)
    (tmp_path / "service.py").write_text(
        "from tests.consumer.place import Place\n"
        f"consumer = Place{(place.dsn, place.kafka, place.topic)}.consumer()\n"
    )
    root = str(Path(__file__).parents[2])
    process: forks.Popen[str] = forks.Popen(
        [
            sys.executable,
            "-m",
            "outbox_pipelines",
            "consumer",
            "run",
            "service:consumer",
            "--metrics-port",
            "0",
        ],
        env=clean_environment() | {"PYTHONPATH": root},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        [url] = re.findall(r"metrics at (http://127\.0\.0\.1:\d+/metrics)$", line.strip())
        wait_until(lambda: scraped(url)["handled_total"] == 5, what="all effects", seconds=60)
    finally:
        process.terminate()
        process.communicate(timeout=600)
    assert process.returncode == 0
