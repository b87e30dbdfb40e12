"""Assets of a user that are built on an archived day."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from outbox_pipelines.defs import ArchiveResource, Outbox, outbox_definitions
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.expectations.archived_day import validate
from tests.quality.expectations.archived import DAY, event, write

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, heading: str, language: str) -> list[str]:
    """The code blocks of a language in a chapter."""
    chapter = (DOCS / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{language}\n(.*?)```", chapter, re.DOTALL)


def run(code: str, names: dict[str, object]) -> None:
    """Run an example; this module's postponed annotations are not its own."""
    exec(compile(code, "example", "exec", dont_inherit=True), names)


def test_the_example_in_python_works(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Guards against a page whose example does not run."""
    write(tmp_path, [event(n, event_type="order.placed", payload='{"total": 5}') for n in range(3)])
    example = blocks("dagster.md", "Build on an archived day", "python")[0]
    found: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORDERS_ARCHIVE", str(tmp_path))
        run(example.replace("2026, 11, 1", f"{DAY.year}, {DAY.month}, {DAY.day}"), found)
        defs = found["defs"]
        assert isinstance(defs, dg.Definitions)
        result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, partition_key=str(DAY), asset_selection=[dg.AssetKey("revenue")]
        )
    (made,) = result.asset_materializations_for_node("revenue")
    assert made.metadata["total"].value == 15
    graph = defs.resolve_asset_graph()
    archive = dg.AssetKey(["outbox", "orders", "archive"])
    assert graph.get(dg.AssetKey("revenue")).parent_keys == {archive}
    assert graph.get(archive).partitions_def == graph.get(dg.AssetKey("revenue")).partitions_def


def test_a_day_that_is_not_archived_is_one_line(tmp_path: Path) -> None:
    """Guards against an empty frame, which a report would take for a day without events."""
    write(tmp_path, [event(1)])
    archive = ArchiveResource(url=str(tmp_path))
    assert len(archive.dataframe(DAY)) == len(archive.relation(str(DAY)).fetchall()) == 1
    with pytest.raises(SetupError, match="2026-11-21 is not in the archive"):
        archive.dataframe(DAY + timedelta(1))


def test_freshness_and_automation_are_those_of_the_archive() -> None:
    """Guards against attributes that are accepted and have no effect."""
    policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=30))
    condition = dg.AutomationCondition.on_cron("10 2 * * *")
    outbox = Outbox(
        name="orders", partition_start=DAY, freshness_policy=policy, automation_condition=condition
    )
    graph = outbox_definitions(outbox).resolve_asset_graph()
    archive = graph.get(outbox.key("archive"))
    assert (archive.freshness_policy, archive.automation_condition) == (policy, condition)
    assert {key for key in graph.get_all_asset_keys() if graph.get(key).automation_condition} == {archive.key}


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ({"blocking_checks": ["payload_valid"]}, "archive has no check 'payload_valid': write some of"),
        ({"blocking_checks": "payloads_valid"}, "write a list"),
        ({"freshness_policy": 30}, "write a template that returns a FreshnessPolicy"),
        ({"automation_condition": "@daily"}, "write a template such as"),
    ],
)
def test_a_wrong_attribute_is_reported(attribute: dict[str, object], says: str) -> None:
    """Guards against a code location that does not load, or a check that blocks nothing."""
    outbox = Outbox(name="orders", partition_start=DAY, **attribute)  # type: ignore[arg-type]
    assert says in str(outbox.error)
    assert outbox_definitions(outbox).resolve_asset_graph().has(outbox.key("archive"))


def test_the_example_of_a_suite_works(tmp_path: Path) -> None:
    """Guards against a page on data quality whose example is not evaluated."""
    (example,) = blocks("days.md", "Data quality", "python")
    settings = write(tmp_path / "archive", [event(1, payload='{"total": 1}')])
    settings = settings.model_copy(update={"expectations": tmp_path / "quality"})
    run(example.replace('"quality"', repr(str(tmp_path / "quality"))), {})
    (finding,) = validate(settings, DAY).findings["own_expectations"]
    assert finding.suite == "outbox_day_own"
    assert not finding.status
