"""The Helm chart, by the real Helm: what it renders, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import CHART, DEPLOY, documents
from tests.interop.chart import MANIFESTS, helm, rendered, template

_RULES = DEPLOY / "prometheus" / "rules.yml"
_BOARD = DEPLOY / "grafana" / "outbox.json"


def _objects(*values: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [each for each in yaml.safe_load_all(rendered(*values)) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_the_manifests_are_of_the_chart(path: Path) -> None:
    """Guards against a manifest that was edited, and a chart that was changed without `make chart`."""
    assert path.read_text() == rendered(*MANIFESTS[path])


def test_nothing_is_found_in_it() -> None:
    for values in ((), ("-f", str(CHART / "thirty-teams.yaml"))):
        done = helm("lint", "--strict", str(CHART), *values)
        assert done.returncode == 0, done.stdout + done.stderr


def test_monitoring_is_of_the_files_for_operators() -> None:
    """Guards against rules and a dashboard that differ from those that are tested."""
    files = f"monitoring.rules={_RULES},monitoring.dashboard={_BOARD}"
    found = _objects("--set-file", files, "--set", "monitoring.serviceMonitor=true")
    (rules,) = documents(_RULES)
    assert found["PrometheusRule", "outbox"]["spec"] == rules
    assert found["ConfigMap", "outbox-dashboard"]["data"]["outbox.json"] == _BOARD.read_text()
    assert ("ServiceMonitor", "outbox-relay") in found


def test_parts_can_be_left_out() -> None:
    """Guards against an object that is left of a part, or refers to one."""
    parts = ("relay", "dagster", "migrate")
    found = _objects(
        "--set", ",".join(f"{part}.enabled=false" for part in parts), "--set", "network.policies=false"
    )
    assert found == {}


def test_grants_and_consumers(tmp_path: Path) -> None:
    """Guards against a value that reaches no pod."""
    values = {
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["pull"]},
        "migrate": {"grants": '[roles]\nwriter = "shop"\n'},
        "consumers": {
            "billing": {
                "image": "billing:1",
                "command": ["python", "-m", "billing"],
                "secret": "billing",
                "env": {"LEVEL": "1"},
                "metricsPort": 9000,
            }
        },
        "identities": {"dagster-code": {"cloud/role": "archive"}},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    found = _objects("-f", str(file))
    assert found["ConfigMap", "outbox-grants"]["data"]["grants.toml"] == '[roles]\nwriter = "shop"\n'
    pod = found["Job", "outbox-migrate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["outbox", "migrate", "--grants", "/etc/outbox/grants.toml"]
    assert pod["containers"][0]["image"] == "outbox-pipelines@sha256:" + "0" * 64
    assert (pod["imagePullSecrets"], pod["tolerations"]) == ([{"name": "pull"}], values["tolerations"])
    pod = found["Deployment", "outbox-consumer-billing"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "billing"]
    assert container["env"] == [{"name": "LEVEL", "value": "1"}]
    assert container["envFrom"] == [{"secretRef": {"name": "billing"}}]
    assert ("Service", "outbox-consumer-billing") in found
    identity = found["ServiceAccount", "outbox-dagster-code"]
    assert identity["metadata"]["annotations"] == {"cloud/role": "archive"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("relay.replica=3", "relay"),
        ("relay.replicas=0", "relay.replicas"),
        ("image.digest=latest", "image.digest"),
        ("settings.OUTBOX_DSN=postgresql://x", "OUTBOX_DSN"),
        ("fleet.enabled=true", "fleet.config is the text of an outbox.toml"),
        ("consumers.Billing.image=x", "consumers"),
    ],
)
def test_a_mistake_is_refused(value: str, reason: str) -> None:
    """Guards against a value that is misspelled and has no effect, and a password among the settings."""
    done = template("--set", value)
    assert done.returncode != 0
    assert reason in done.stderr.replace("/", "."), done.stderr
