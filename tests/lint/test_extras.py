"""What the commands need: an extra with too little in it fails on a machine that has no more."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Distributions and the packages that they install.
PACKAGES = {
    "click": "click",
    "confluent-kafka": "confluent_kafka",
    "prometheus-client": "prometheus_client",
    "psycopg": "psycopg",
    "pydantic": "pydantic pydantic_core",
}
# As if the packages were not installed.
PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from outbox_pipelines.__main__ import main
main()
"""


def run(extra: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`outbox …` where nothing but an extra is installed."""
    had = {one.partition(">")[0].partition("[")[0] for one in (EXTRAS[extra] if extra else ())}
    absent = {one for name, packages in PACKAGES.items() if name not in had for one in packages.split()}
    return run_without(absent, *arguments)


def run_without(missing: set[str], *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`outbox …` with these settings where these packages are not installed."""
    return subprocess.run(
        [sys.executable, "-P", "-c", f"MISSING = {missing!r}\n{PROGRAM}", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        | {"PYTHONPATH": str(ROOT), **settings},
        capture_output=True,
        text=True,
    )


def test_lint_needs_click_alone(tmp_path: Path) -> None:
    """Guards against a linter that installs a database's driver and Kafka's client into a user's pipeline."""
    assert [one.partition(">")[0] for one in EXTRAS["lint"]] == ["click"]
    (tmp_path / "a.py").write_text("import outbox_pipelines.writer\n")
    done = run("lint", "lint-writes", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no findings in 1 file\n")


def test_the_consumer_has_its_commands() -> None:
    """Guards against a service that only consumes, for which `outbox consumer migrate` requires the relay."""
    done = run("consumer", "consumer", "--help")
    assert done.returncode == 0, done.stderr
    assert "migrate" in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [("lint-writes", "lint"), ("consumer", "consumer"), ("relay", "relay"), ("", "relay")],
)
def test_the_writer_alone(command: str, extra: str) -> None:
    """Guards against a traceback, or advice that leads to more than is needed."""
    done = run(None, *filter(None, [command]))
    assert done.returncode == 2
    assert done.stderr.endswith(f"pip install 'outbox-pipelines[{extra}]'\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["migrate", "status"])
def test_a_command_imports_only_what_it_needs(command: str) -> None:
    """Guards against seconds of imports before each command, for packages that only others need."""
    heavy = {"confluent_kafka", "dagster", "duckdb", "great_expectations", "pandas", "pyarrow"}
    done = run_without(heavy, command)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("outbox: no database is named: ")


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("archive query TABLE", "duckdb", "archive"),
        ("archive verify 2026-11-01", "obstore", "archive"),
        ("bodies check", "obstore", "bodies"),
        ("replay --dry-run --since 2026-11-01", "duckdb", "archive"),
        ("catalog check", "yaml", "catalog"),
    ],
)
def test_what_a_command_needs_later(command: str, missing: str, extra: str, tmp_path: Path) -> None:
    """Guards against a traceback where the relay's packages are installed, and those of a command are not."""
    places = {name: str(tmp_path) for name in ("OUTBOX_ARCHIVE", "OUTBOX_BODIES", "OUTBOX_CATALOG_FILE")}
    servers = {"OUTBOX_DSN": "host=127.0.0.1 port=1", "OUTBOX_KAFKA": "127.0.0.1:1"}
    done = run_without({missing}, *command.split(), **places, **servers)
    assert done.stderr == f"outbox: {missing} is not installed: pip install 'outbox-pipelines[{extra}]'\n"
    assert done.returncode == 2
