"""Prometheus's rules and Grafana's dashboard: of what a relay really serves, and of every check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from prometheus_client import CollectorRegistry

from outbox_pipelines.quality.rules import RULES, Rule
from outbox_pipelines.relay.telemetry.prometheus import Database, Families
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

pytestmark = pytest.mark.slow

CHECKS = {rule.name for rule in RULES} | {"database"}


@pytest.fixture(scope="module")
def served() -> set[str]:
    """The names of all samples that a relay can serve."""
    registry = CollectorRegistry()
    Families(registry)
    # Without a database it says the names all the same.
    registry.register(Database(Settings(dsn="")))
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
    assert {"job_outbox_shard:outbox_lag_seconds:max", "job_outbox_shard:outbox_unpublished:max"} <= alerted


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
            assert '{job="$job",outbox=~"$outbox"}' in target["expr"], panel["title"]
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served if "batch" not in name}
    left_out = plain - {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {name for name in left_out if "batch" not in name} == set()


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
    assert {alert["labels"]["check"] for alert in alerts()} == CHECKS
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
            and "absent" not in alert["expr"]
        ]
        if limit is None:
            assert found == []
            continue
        (expression,) = found
        sign = "<" if rule.is_least else ">="
        assert f"{sign} {limit:.0f}" in expression
        # A warning ends where the error begins: one problem sends one alert.
        if severity == "warning" and rule.error is not None:
            assert expression.endswith(f">= {limit:.0f} < {rule.error:.0f}")


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


def test_promtool_is_asked_about_every_alert() -> None:
    """Guards against an alert without a test."""
    text = (DEPLOY / "prometheus" / "rules.test.yml").read_text()
    tested = set(re.findall(r'"severity": "(\w+)", "check": "(\w+)"', text))
    assert tested == {(alert["labels"]["severity"], alert["labels"]["check"]) for alert in alerts()}
    assert set(re.findall(r"alertname: (\w+)", text)) == {alert["alert"] for alert in alerts()}
