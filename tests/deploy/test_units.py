"""The systemd units: what they say is right, and their commands run Dagster as three processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.local.server import free_port
from outbox_pipelines.relay.core import flow
from tests.conftest import patience, wait_until
from tests.deploy.files import DEPLOY, ROOT, check_command, settings_of
from tests.deploy.test_manifests import env_asked_for

pytestmark = pytest.mark.slow

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
BIN = "/opt/outbox/venv/bin/"


class _Unit(ConfigParser):
    """systemd's files: a name may come twice, and its case counts."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=("=",))
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string(path.read_text())

    @property
    def command(self) -> list[str]:
        return shlex.split(self["Service"]["ExecStart"].replace("%i", "9187"))


def environment_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value.strip("'") for name, value in (line.split("=", 1) for line in lines)}


def _user(path: Path) -> str:
    return path.stem.removesuffix("@").replace("-dagster-", "-")


def _given(path: Path) -> dict[str, str]:
    """The environment of a unit, of the samples."""
    files = [
        line.partition("=")[2]
        for line in path.read_text().splitlines()
        if line.startswith("EnvironmentFile=")
    ]
    given: dict[str, str] = {}
    for file in files:
        assert Path(file).parent == Path("/etc/outbox")
        given |= environment_of(DEPLOY / "systemd" / Path(file).name)
    return given


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_that_exists(path: Path) -> None:
    """Guards against a unit that fails at its first start, and one that does not come back."""
    unit = _Unit(path)
    assert unit.command[0].startswith(BIN)
    check_command(unit.command)
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    # No two have the same user, whose processes may read and end each other.
    assert service["User"] == service["Group"] == _user(path)
    assert service["PrivateTmp"] == "yes"
    assert "CapabilityBoundingSet" in service
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    # More than an orderly stop takes: a relay's, and its spans'; a code server's, which waits for its calls.
    least = {"outbox-relay@": flow._STOP_SECONDS + 5, "outbox-dagster-code": 60}.get(path.stem, 10)
    assert float(service["TimeoutStopSec"]) > least
    for other in unit["Unit"].get("After", "").split():
        assert other == "network-online.target" or (DEPLOY / "systemd" / other).exists()


def test_there_is_a_unit_for_each_process() -> None:
    """Guards against `dagster dev` in production: it does not recover from the loss of its code server."""
    assert [path.stem for path in UNITS] == [
        "outbox-dagster-code",
        "outbox-dagster-daemon",
        "outbox-dagster-webserver",
        "outbox-relay@",
    ]


def test_systemd_takes_them(tmp_path: Path) -> None:
    """Guards against a name that systemd ignores with a warning that is easy to miss."""
    for path in UNITS:
        text = path.read_text().replace(BIN, f"{Path(sys.executable).parent}/")
        # Neither user nor directory is of this machine.
        kept = [line for line in text.splitlines() if not line.startswith(("User=", "Group="))]
        (tmp_path / path.name.replace("@", "@9187")).write_text("\n".join(kept))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        # Then the parsing above has to do.
        return
    for path in tmp_path.iterdir():
        done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True, timeout=600)
        ours = [line for line in done.stderr.splitlines() if "outbox" in line]
        assert (done.returncode, ours) == (0, [])


def test_each_unit_has_the_settings_it_needs_and_no_more() -> None:
    """Guards against a sample with a setting that is never read, or is refused, and against a web server that
    leads an intruder to the application's database."""
    relay, code, daemon, web = (
        _given(DEPLOY / "systemd" / f"outbox-{name}.service")
        for name in ("relay@", "dagster-code", "dagster-daemon", "dagster-webserver")
    )
    for of_dagster in (code, daemon, web):
        assert env_asked_for() <= set(of_dagster)
    for of_pages in (daemon, web):
        assert set(of_pages) == env_asked_for()
    assert not any(name.startswith("DAGSTER_") for name in relay)
    assert settings_of(code).archives
    assert settings_of(code).log_format == settings_of(relay).log_format == "json"
    for name in ("OUTBOX_DSN", "PGPASSFILE", "OUTBOX_KAFKA_CONFIG"):
        assert code[name] != relay[name]


# --- the three processes ----------------------------------------------------------------------------------


@contextmanager
def _started(
    path: Path, replaced: dict[str, str], environment: dict[str, str], directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """What a unit's ExecStart starts, with other ports and files; until the block ends."""
    words = [replaced.get(word, word) for word in _Unit(path).command]
    words[0] = words[0].replace(BIN, f"{Path(sys.executable).parent}/")
    with (directory / f"{path.stem}.log").open("wb") as log:
        process = subprocess.Popen(
            words,
            env=environment,
            cwd=directory,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # As systemd starts it. In the background of a shell SIGINT is ignored, and Dagster's processes
            # take SIGTERM as they take SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(patience(30))


def _end(process: subprocess.Popen[bytes], path: Path) -> None:
    """As systemd does, which kills after that."""
    process.send_signal(signal.SIGTERM)
    process.wait(int(_Unit(path)["Service"]["TimeoutStopSec"]))


def _ask(port: int, query: str) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/graphql",
        json.dumps({"query": query}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]


_LAUNCH = """mutation {launchRun(executionParams: {selector: {repositoryLocationName: "outbox",
    repositoryName: "__repository__", jobName: "purge_history"}, runConfigData: {}, mode: "default"}) {
    __typename ... on LaunchRunSuccess {run {runId}} ... on PythonError {message}}}"""
_RUN = """{{runOrError(runId: "{}") {{... on Run {{status eventConnection {{events {{
    ... on MessageEvent {{message}} ... on ErrorEvent {{error {{message}}}}}}}}}}}}}}"""
_LOCATIONS = """{workspaceOrError {... on Workspace {locationEntries {name locationOrLoadError {
    ... on RepositoryLocation {repositories {jobs {name}}} ... on PythonError {message}}}}}}"""


def test_the_processes_of_the_units_work_together(tmp_path: Path) -> None:
    """Guards against command lines that do not fit: to each other, to the workspace, to the instance."""
    code, web = free_port(), free_port()
    home = tmp_path / "dagster"
    home.mkdir()
    # As the deployed one, but without PostgreSQL. No sensor of ours: without a database they only fail.
    shutil.copy(ROOT / "outbox_pipelines" / "defs" / "dagster.yaml", home)
    # Three that make the same tables at once get in each other's way; systemd would start them again.
    with dg.DagsterInstance.from_config(str(home)):
        pass
    workspace = (DEPLOY / "dagster" / "workspace.yaml").read_text()
    (tmp_path / "workspace.yaml").write_text(workspace.replace("4266", str(code)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    environment = kept | {
        "DAGSTER_HOME": str(home),
        "DAGSTER_CODE_HOST": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    replaced = {
        "4266": str(code),
        "3000": str(web),
        "/etc/outbox/workspace.yaml": str(tmp_path / "workspace.yaml"),
    }
    units = {path.stem.rpartition("-")[2]: path for path in UNITS if "dagster" in path.stem}

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{web}/server_info", timeout=60) as answer:
                return "dagster_webserver_version" in json.load(answer)
        except OSError:
            return False

    def is_loaded() -> bool:
        return '"purge_history"' in json.dumps(_ask(web, _LOCATIONS))

    def launched() -> str:
        """A run that the web server has asked the code server about, and queued: its id."""
        found: dict[str, Any] = {}

        def is_launched() -> bool:
            # A web server that has just lost its code server says so, by an answer or by a failure.
            with suppress(urllib.error.HTTPError):
                found.update(_ask(web, _LAUNCH)["launchRun"])
            return found.get("__typename") == "LaunchRunSuccess"

        wait_until(is_launched, seconds=60, what="the run to be launched")
        return str(found["run"]["runId"])

    def said() -> str:
        return "\n".join(log.read_text()[-3_000:] for log in tmp_path.glob("*.log"))

    with ExitStack() as processes:
        started = {
            name: processes.enter_context(_started(path, replaced, environment, tmp_path))
            for name, path in units.items()
        }
        wait_until(answers, seconds=60, what="the web server to answer")
        wait_until(is_loaded, seconds=60, what="the location to load")
        query = _RUN.format(launched())

        def status() -> str:
            return str(_ask(web, query)["runOrError"]["status"])

        # The daemon takes it from the queue, the code server starts it; and by the location's name it knows
        # whose runs it may remove.
        wait_until(lambda: status() in ("SUCCESS", "FAILURE"), seconds=60, what="the run to end")
        assert status() == "SUCCESS", f"{json.dumps(_ask(web, query))[-5_000:]}\n{said()}"
        _end(started["daemon"], units["daemon"])
        # Killed, and started again as systemd does: the web server reconnects. The run stays queued.
        os.killpg(started["code"].pid, signal.SIGKILL)
        started["code"].wait(patience(30))
        started["code"] = processes.enter_context(_started(units["code"], replaced, environment, tmp_path))
        launched()
        # The code server waits up to a minute for its callers' calls: so they end first.
        for name in ("webserver", "code"):
            _end(started[name], units[name])
