"""The definitions together with those of a project that has nothing to do with an outbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import outbox_definitions
from tests.defs.conftest import failure_of

pytestmark = pytest.mark.slow

# A project with all that a merge may meet: its own executor, I/O manager, and a resource of an obvious name.
PROJECT = """
import dagster as dg

class Outbox(dg.ConfigurableResource):
    mails: int = 7

class Refusing(dg.IOManager):
    def handle_output(self, context, obj):
        raise AssertionError(context.asset_key)

    def load_input(self, context):
        raise AssertionError(context.asset_key)

@dg.asset
def mails(outbox: Outbox) -> dg.MaterializeResult:
    return dg.MaterializeResult(metadata={"mails": outbox.mails})

@dg.asset_check(asset=mails)
def enough() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)

@dg.op
def count(outbox: Outbox) -> None: ...

@dg.job
def nightly() -> None:
    count()

@dg.sensor(job=nightly)
def watch(outbox: Outbox):
    return dg.SkipReason(str(outbox.mails))

mine = lambda: dg.Definitions(
    assets=[mails],
    asset_checks=[enough],
    jobs=[nightly, dg.define_asset_job("all_mails", selection=[mails])],
    sensors=[watch],
    resources={"outbox": Outbox(), "io_manager": Refusing()},
    executor=dg.multiprocess_executor,
)
"""


def project() -> dg.Definitions:
    """The project's own definitions."""
    names: dict[str, Any] = {"__name__": "project"}
    exec(PROJECT, names)
    found: dg.Definitions = names["mine"]()
    return found


@pytest.fixture(scope="module")
def merged() -> dg.Definitions:
    return dg.Definitions.merge(project(), outbox_definitions())


def test_everything_of_both_is_there(merged: dg.Definitions) -> None:
    """Guards against a merge that fails, or takes from one of them."""
    repository = merged.get_repository_def()
    repository.load_all_definitions()
    assert {"nightly", "all_mails", "relay_session", "archive_day"} <= set(repository.job_names)
    keys = {key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()}
    assert {"mails", "outbox/relay", "outbox/archive"} <= keys


def test_each_keeps_its_executor(merged: dg.Definitions) -> None:
    """Guards against an executor of the outbox for the user's jobs, and the user's for the outbox's."""
    repository = merged.get_repository_def()
    executors = {name: repository.get_job(name).executor_def.name for name in repository.job_names}
    assert {executors.pop(name) for name in ("nightly", "all_mails", "__ASSET_JOB")} == {"multiprocess"}
    assert set(executors.values()) == {"in_process"}
    # Alone, the user's executor is Dagster's own.
    assert outbox_definitions().executor is None


def test_each_keeps_its_resource(merged: dg.Definitions, instance: dg.DagsterInstance) -> None:
    """Guards against a resource of ours under the user's jobs."""
    assert merged.resources is not None
    assert set(merged.resources) == {"outbox", "io_manager"}
    done = merged.resolve_job_def("all_mails").execute_in_process(instance=instance)
    assert done.asset_materializations_for_node("mails")[0].metadata["mails"].value == 7
    job = merged.resolve_job_def("maintain_partitions")
    failed = job.execute_in_process(instance=instance, raise_on_error=False)
    [error, *_] = instance.all_logs(failed.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    assert "OUTBOX_DSN" in failure_of(error.dagster_event)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("defs = dg.Definitions.merge(outbox_definitions(), mine())", "mails outbox/relay"),
        # What looks right, and is not: Dagster must say so.
        (
            "from outbox_pipelines.definitions import defs as theirs; defs = mine()",
            "Cannot have more than one Definitions object",
        ),
    ],
)
def test_a_module_of_a_user_is_loaded_whole(tmp_path: Path, ending: str, expected: str) -> None:
    """Guards against the user's assets that vanish without an error."""
    file = tmp_path / "project.py"
    file.write_text(f"from outbox_pipelines.defs import outbox_definitions\n{PROJECT}\n{ending}\n")
    script = (
        "import sys; from dagster._core.workspace.autodiscovery import loadable_targets_from_python_file;"
        "[target] = loadable_targets_from_python_file(sys.argv[1]);"
        "keys = target.target_definition.get_repository_def().asset_graph.get_all_asset_keys();"
        "print(*sorted({key.to_user_string() for key in keys} & {'mails', 'outbox/relay'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=120
    )
    assert expected in done.stdout + done.stderr
