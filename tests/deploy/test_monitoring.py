"""Prometheus's rules and Grafana's dashboard: of what a relay really serves, and of every check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outbox_pipelines.consumer import prometheus as consumers
from outbox_pipelines.quality.rules import RULES, Rule
from outbox_pipelines.relay.fleet.fleet_metrics import Databases
from outbox_pipelines.relay.telemetry.exporter import DatabaseCollector, Families, configured, families
from outbox_pipelines.settings import Settings
from tests.deploy.files import (
    DEPLOY,
    alerts,
    check_command,
    dashboard,
    documents,
    metrics_in,
    panels,
    rules,
)
from tests.quality.test_rules import WELL

pytestmark = pytest.mark.slow

# Those of `outbox status`, and those that only Prometheus can see.
CHECKS = {rule.name for rule in RULES} | {"database"}
OF_PROMETHEUS = {"not_reported", "standby", "error_budget", "consumer"}


class _Consumers(Collector):
    """The metrics of a consumer, without values."""

    def collect(self) -> Iterable[Metric]:
        return consumers._families().values()


@pytest.fixture(scope="module")
def served() -> set[str]:
    """The names of all samples that a relay or a consumer can serve."""
    registry = CollectorRegistry()
    Families(registry)
    # Without a database it says the names all the same.
    registry.register(DatabaseCollector(Settings(dsn="")))
    registry.register(_Consumers())
    names: set[str] = set()
    for family in registry.collect():
        names |= {
            "counter": {f"{family.name}_total"},
            "histogram": {f"{family.name}_{suffix}" for suffix in ("bucket", "count", "sum")},
        }.get(family.type, {family.name})
    assert "outbox_publish_seconds_bucket" in names
    return names


def test_rules_ask_for_what_is_served(served: set[str]) -> None:
    """Guards against an alert that can never fire, because its metric has another name."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        asked = metrics_in(rule["expr"])
        assert asked, rule
        assert asked <= served | recorded, rule
    # Each is used: an unused rule costs Prometheus as much as any other.
    alerted = set().union(*(metrics_in(rule["expr"]) for rule in alerts()))
    assert "namespace_job_outbox_shard:outbox_oldest_unpublished_age_seconds:max2m" in alerted
    # An outbox, or a namespace, hides nothing of another one.
    for rule in rules():
        for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            assert labels.startswith(("namespace, job, outbox", "namespace, job, source")), rule


def test_panels_ask_for_what_is_served(served: set[str]) -> None:
    """Guards against a panel that stays empty; and each metric has its place on the board."""
    asked: set[str] = set()
    for panel in panels():
        for target in panel["targets"]:
            found = metrics_in(target["expr"])
            assert found, panel["title"]
            assert found <= served, panel["title"]
            asked |= found
            # A board of the chosen outboxes, where several are scraped.
            chosen = 'job="$consumer_job"' if "consumer" in target["expr"] else 'job="$job",outbox=~"$outbox"'
            assert f'{{namespace=~"$namespace",{chosen}}}' in target["expr"], panel["title"]
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served if "batch" not in name}
    assert plain - {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} == {
        f"outbox_consumer_{name}_total"
        for name in ("dead_lettered", "ignored", "outages", "received", "skipped_replays")
    }


def test_the_board_is_in_order() -> None:
    """Guards against panels that lie on each other, and that say nothing of themselves."""
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert all(panel["description"].endswith(".") for panel in panels())
    (source,) = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    assert source["datasources"][0]["type"] == "prometheus"
    (provider,) = documents(DEPLOY / "grafana" / "provisioning" / "dashboards" / "outbox.yaml")
    (compose,) = documents(DEPLOY / "compose.yaml")
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert f"{provider['providers'][0]['options']['path']}/outbox.json" in mounts
    assert "/etc/grafana/provisioning" in mounts


def test_every_check_has_its_alert() -> None:
    """Guards against a check that fails in Dagster without an alert, and the other way round."""
    assert {alert["labels"]["check"] for alert in alerts()} == CHECKS | OF_PROMETHEUS
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["for"]
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert alert["annotations"]["runbook"] == f"docs/operating.md#{alert['labels']['check']}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_alerts_have_the_limits_of_the_checks(rule: Rule) -> None:
    """Guards against two truths about one outbox."""
    for severity, limit in (("warning", rule.warn), ("critical", rule.error)):
        found = [
            alert["expr"]
            for alert in alerts()
            if (alert["labels"]["check"], alert["labels"]["severity"]) == (rule.name, severity)
        ]
        if limit is None:
            assert found == []
            continue
        (expression,) = found
        sign = "<" if rule.is_least else ">="
        assert f"{sign} {limit:.0f}" in expression
        # No upper limit: what oscillates across it would never last.
        assert expression.endswith(f"{sign} {limit:.0f}")


def test_an_error_suppresses_its_warning() -> None:
    """Guards against two pages for one problem: Alertmanager compares the labels of each pair."""
    (config,) = documents(DEPLOY / "prometheus" / "alertmanager.yml")
    pair, cause = config["inhibit_rules"]
    by_severity = {(alert["alert"], alert["labels"]["severity"]): alert["expr"] for alert in alerts()}
    pairs = [name for name, severity in by_severity if severity == "warning"]
    pairs = [name for name in pairs if (name, "critical") in by_severity]
    assert len(pairs) >= 7
    for name in pairs:
        ours = {
            tuple(re.findall(r"\bby \(([^)]*)\)|namespace_(\w+):", by_severity[name, severity]))
            for severity in ("warning", "critical")
        }
        assert len(ours) == 1, name
    assert {"alertname", "namespace", "job", "outbox", "shard"} <= set(pair["equal"])
    names = {alert["alert"] for alert in alerts()}
    for matcher in (*cause["source_matchers"], *cause["target_matchers"]):
        assert set(re.findall(r"Outbox\w+", matcher)) <= names


def test_descriptions_name_what_helps() -> None:
    """Guards against an alert at night that leaves it to the reader to find the command."""
    for alert in alerts():
        commands = re.findall(r"`([^`]+)`", alert["annotations"]["description"])
        assert commands, alert["alert"]
    said = " ".join(alert["annotations"]["description"] for alert in alerts())
    named = set(re.findall(r"`outbox ([a-z -]+[a-z])", said))
    assert len(named) >= 8
    for command in named:
        check_command(["outbox", *command.split()])


def test_promtool_takes_the_rules() -> None:
    """Guards against rules that Prometheus refuses, and alerts that fire too early, or never."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("CI"), "promtool is missing: apt-get install prometheus"
        pytest.skip("promtool is not here: apt-get install prometheus (20 MB) to run its tests of the rules")
    directory = DEPLOY / "prometheus"
    for arguments in (
        ("check", "rules", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules.test.yml"),
    ):
        done = subprocess.run(
            [promtool, *arguments], cwd=directory, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FAILED" not in done.stdout


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here: apt-get install prometheus"
)
def test_promtool_takes_the_names_of_the_metrics() -> None:
    """Guards against names that break Prometheus's conventions."""
    registry = CollectorRegistry()
    to = Families(registry)
    for family in vars(to).values():
        if not isinstance(family, bool):
            family.labels(*["0"] * len(family._labelnames))
    registry.register(_Measured())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


class _Measured(Collector):
    def collect(self) -> Iterable[Metric]:
        settings = Settings(dsn="")
        return [configured({"outbox": True}), *families([(settings, WELL)]), *consumers._families().values()]


def test_a_fleet_reports_every_configured_outbox() -> None:
    """Guards against an outbox without any series, because a variable with its DSN is not set."""
    registry = CollectorRegistry()
    registry.register(Databases([Settings(name="orders", dsn="")], ["billing"]))
    found = {
        outbox: registry.get_sample_value("outbox_configured", {"outbox": outbox})
        for outbox in ("orders", "billing")
    }
    assert found == {"orders": 1, "billing": 0}


def test_promtool_is_asked_about_every_alert() -> None:
    """Guards against an alert without a test."""
    text = (DEPLOY / "prometheus" / "rules.test.yml").read_text()
    tested = set(re.findall(r'"severity": "(\w+)", "check": "(\w+)"', text))
    assert tested == {(alert["labels"]["severity"], alert["labels"]["check"]) for alert in alerts()}
    assert set(re.findall(r"alertname: (\w+)", text)) == {alert["alert"] for alert in alerts()}
