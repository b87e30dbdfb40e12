"""deploy/fleet: the same outboxes in each of its files, and commands that exist."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from outbox_pipelines.outboxes import load_outboxes
from tests.deploy.files import DEPLOY, check_command, check_settings, documents
from tests.deploy.test_units import _Unit, environment_of

FLEET = DEPLOY / "fleet"
SECRETS = environment_of(FLEET / "secrets.env")


def test_the_outboxes_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a sample that the relay refuses."""
    monkeypatch.setenv("OUTBOX_CONFIG", str(FLEET / "outbox.toml"))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    found = load_outboxes()
    assert found.errors == {}
    assert list(found.settings) == ["orders", "billing"]


def test_the_unit_runs_the_fleet() -> None:
    """Guards against a unit without the variables of its outboxes."""
    path = FLEET / "outbox-fleet@.service"
    unit = _Unit(path)
    check_command(unit.command)
    assert "--all" in unit.command
    assert unit["Service"]["Restart"] == "always"
    files = re.findall(r"EnvironmentFile=/etc/outbox/(.+)", path.read_text())
    given = {name for file in files for name in environment_of(FLEET / file)}
    assert {"OUTBOX_CONFIG", *SECRETS} <= given
    check_settings(given)


def test_compose_gives_the_secrets() -> None:
    """Guards against an outbox whose variable does not reach the container."""
    (found,) = documents(FLEET / "compose.yaml")
    service = found["services"]["fleet"]
    check_command(service["command"])
    assert set(SECRETS) <= set(service["environment"])
    check_settings(set(service["environment"]))
    source, target = service["volumes"][0].split(":")[:2]
    assert (FLEET / source).is_file()
    assert service["environment"]["OUTBOX_CONFIG"] == target


def test_kubernetes_has_the_same_outboxes() -> None:
    """Guards against two files that differ, and a Deployment that mounts neither."""
    objects: dict[str, Any] = {found["kind"]: found for found in documents(FLEET / "kubernetes.yaml")}
    text = objects["ConfigMap"]["data"]["outbox.toml"]
    assert tomllib.loads(text) == tomllib.loads((FLEET / "outbox.toml").read_text())
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["command"])
    assert {"secretRef": {"name": "outbox-fleet"}} in container["envFrom"]
    assert any(volume.get("configMap") == {"name": "outbox-fleet"} for volume in pod["volumes"])
    named = {variable["name"]: variable["value"] for variable in container["env"]}
    assert named["OUTBOX_CONFIG"] == "/etc/outbox/outbox.toml"
