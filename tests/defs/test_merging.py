"""The definitions together with those of a project that has nothing to do with an outbox."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.workspace.autodiscovery import loadable_targets_from_python_file

from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.build import build
from outbox_pipelines.defs.storage import nothing
from tests.defs.conftest import EVERYTHING, failure_of, serving

pytestmark = pytest.mark.slow

# A project with all that a merge may meet: its own executor, I/O manager, and a resource of an obvious name.
PROJECT = """
import dagster as dg

class Outbox(dg.ConfigurableResource):
    mails: int = 7

class Refusing(dg.ConfigurableIOManager):
    path: str

    def setup_for_execution(self, context):
        assert self.path == "usable", "the project's I/O manager is set up"

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

@dg.logger
def console(context):
    import logging, os
    assert os.environ["PATH_OF_THE_PROJECT"] == "usable", "the project's logger is set up"
    return logging.getLogger("project")

mine = lambda: dg.Definitions(
    assets=[mails],
    asset_checks=[enough],
    jobs=[nightly, dg.define_asset_job("all_mails", selection=[mails])],
    sensors=[watch],
    resources={"outbox": Outbox(), "io_manager": Refusing(path=dg.EnvVar("PATH_OF_THE_PROJECT"))},
    executor=dg.multiprocess_executor,
    loggers={"console": console},
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


def test_each_keeps_its_resource(
    merged: dg.Definitions, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a resource of ours under the user's jobs."""
    monkeypatch.setenv("PATH_OF_THE_PROJECT", "usable")
    assert merged.resources is not None
    assert set(merged.resources) == {"outbox", "io_manager"}
    done = merged.resolve_job_def("all_mails").execute_in_process(instance=instance)
    assert done.asset_materializations_for_node("mails")[0].metadata["mails"].value == 7
    job = merged.resolve_job_def("maintain_partitions")
    failed = job.execute_in_process(instance=instance, raise_on_error=False)
    [error, *_] = instance.all_logs(failed.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    assert "OUTBOX_DSN" in failure_of(error.dagster_event)


@pytest.mark.parametrize("ours", ["relay_session", "archive", "archive_equals_table"])
def test_a_run_of_ours_needs_no_io_manager_of_the_project(
    merged: dg.Definitions, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, ours: str
) -> None:
    """Guards against a relay that stands still because a user's storage cannot be set up."""
    monkeypatch.delenv("OUTBOX_DSN", raising=False)
    monkeypatch.setenv("PATH_OF_THE_PROJECT", "unusable")
    if ours == "relay_session":
        done = merged.resolve_job_def(ours).execute_in_process(instance=instance, raise_on_error=False)
    else:
        archive = dg.AssetKey(["outbox", "archive"])
        job = merged.resolve_implicit_global_asset_job_def().get_subset(
            asset_selection={archive} if ours == "archive" else None,
            asset_check_selection=set() if ours == "archive" else {dg.AssetCheckKey(archive, ours)},
        )
        done = job.execute_in_process(instance=instance, raise_on_error=False, partition_key="2026-11-20")
    [error] = instance.all_logs(done.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    assert "set OUTBOX_" in failure_of(error.dagster_event)


def test_every_definition_has_its_own_io_manager() -> None:
    """Guards against a job, asset or check that the test above does not run."""
    definitions = outbox_definitions(serving(**EVERYTHING))
    of_assets = {"archive_day", "check_catalog", "check_health", "reconcile_day"}
    of_ops = {job.name: job for job in definitions.jobs or () if job.name not in of_assets}
    assert {"relay_session", "drain_inbox", "cutover"} <= of_ops.keys()
    for job in of_ops.values():
        assert isinstance(job, dg.JobDefinition)
        assert job.resource_defs["io_manager"] is nothing
        assert job.has_specified_loggers
    # Of a component: Dagster resolves its jobs of assets.
    for each in build([serving(**EVERYTHING)], resolves=False).jobs or ():
        assert not isinstance(each, dg.JobDefinition) or each.has_specified_loggers
    executed = [
        each
        for each in (*(definitions.assets or ()), *(definitions.asset_checks or ()))
        if isinstance(each, dg.AssetsDefinition) and each.is_executable
    ]
    assert len(executed) == 11
    for asset in executed:
        assert "io_manager" not in asset.required_resource_keys, asset


def test_an_asset_of_the_project_depends_on_ours(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a dependency on an asset of ours that asks the user for a resource of ours."""
    monkeypatch.setenv("PATH_OF_THE_PROJECT", "usable")

    @dg.asset(deps=[dg.AssetKey(["outbox", name]) for name in ("archive", "events", "relay", "health")])
    def report() -> dg.MaterializeResult[Any]:
        return dg.MaterializeResult()

    merged = dg.Definitions.merge(project(), dg.Definitions(assets=[report]), outbox_definitions())
    job = merged.resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(instance=instance, asset_selection=[report.key]).success


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
def test_a_module_of_a_user_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, expected: str
) -> None:
    """Guards against the user's assets that vanish without an error."""
    file = tmp_path / "project_of_a_user.py"
    file.write_text(f"from outbox_pipelines.defs import outbox_definitions\n{PROJECT}\n{ending}\n")
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    try:
        [target] = loadable_targets_from_python_file(str(file))
        definitions: Any = target.target_definition
        keys = definitions.get_repository_def().asset_graph.get_all_asset_keys()
        found = " ".join(sorted({key.to_user_string() for key in keys} & {"mails", "outbox/relay"}))
    except dg.DagsterInvariantViolationError as error:
        found = str(error)
    assert expected in found
