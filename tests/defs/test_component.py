"""`OutboxComponent` in a project: found by `dg`, scaffolded, and loaded whatever is wrong with its file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.core.component_tree import ComponentTree

from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.component import OutboxComponent
from outbox_pipelines.defs.outbox import PARTS, Outbox
from tests.conftest import clean_environment
from tests.defs.conftest import EVERYTHING, OF_TABLE, serving
from tests.defs.test_downstream import DOCS, blocks, run

pytestmark = pytest.mark.slow

DEFINITIONS = """
from pathlib import Path
import dagster as dg

@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
PROJECT = """
[project]
name = "shop"
version = "1"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "shop"
"""
# What is said about each, once.
WRONG = {
    "misspelled": (
        "name: misspelled\n  colour: red",
        "outbox misspelled: src/shop/defs/misspelled/defs.yaml:5: there is no attribute colour",
    ),
    "number": (
        "name: number\n  parts: 7",
        "outbox number: src/shop/defs/number/defs.yaml:5: attribute parts: input should be a valid list",
    ),
    "unset": (
        "name: unset\n  settings: {kafka: '{{ env.NOT_SET }}'}",
        "outbox unset: kafka has no value: a template may name a variable that is not set",
    ),
    "capitals": (
        "name: My Shop",
        "outbox my_shop: src/shop/defs/capitals/defs.yaml: an outbox cannot be named 'My Shop'",
    ),
    "setting": ("name: setting\n  settings: {kafkaa: x}", "outbox setting: there is no setting 'kafkaa'"),
    "inline": (
        "name: inline\n  settings: {dsn: 'postgresql://a:hunter2@b/c'}",
        "outbox inline: dsn is a secret, and has no place in a definition",
    ),
    "variable": (
        "name: variable\n  dsn_variable: SHOP_DSN",
        "outbox variable: the environment variable SHOP_DSN is not set",
    ),
    "minute": (
        "name: minute\n  schedules: {archive_days: '61 * * * *'}",
        "src/shop/defs/minute/defs.yaml:5: attribute schedules: Found invalid cron schedule '61 * * * *'",
    ),
    "owner": (
        "name: owner\n  translation:\n    owners: [bob]",
        "owner/defs.yaml:6: attribute owners: Invalid owner",
    ),
    "prefix": (
        "name: prefix\n  translation: {key_prefix: [outbox, orders]}",
        "prefix: the outbox orders has the same",
    ),
    "zz_second": ("name: orders", "zz_second is ignored, since src/shop/defs/orders has this name"),
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A project of the same name that another test has loaded.
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "src" / "shop"
    (package / "defs").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").touch()
    (package / "defs" / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    return tmp_path


def dg_(shop: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("dg"), *arguments],
        cwd=shop,
        env=clean_environment() | {"PYTHONPATH": str(shop / "src"), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=600,
    )


def _spoil(shop: Path) -> None:
    """Add a file with each mistake."""
    for name, (attributes, _) in WRONG.items():
        file = shop / "src" / "shop" / "defs" / name / "defs.yaml"
        file.parent.mkdir()
        file.write_text(f"type: outbox_pipelines.OutboxComponent\n\nattributes:\n  {attributes}\n")


def test_a_project_loads_whatever_is_wrong_with_one(
    shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a file that keeps all others from loading, and a mistake that is not reported."""
    orders = shop / "src" / "shop" / "defs" / "orders"
    orders.mkdir()
    (orders / "defs.yaml").write_text(
        "type: outbox_pipelines.OutboxComponent\nattributes: {name: orders, dsn_variable: ORDERS_DSN}\n"
    )
    _spoil(shop)
    monkeypatch.chdir(shop)
    monkeypatch.syspath_prepend(str(shop / "src"))
    definitions = ComponentTree.for_project(shop).build_defs()
    assert (
        dg.AssetKey(["outbox", "orders", "health"]) in definitions.resolve_asset_graph().get_all_asset_keys()
    )
    for _, line in WRONG.values():
        assert line in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.extended
def test_the_commands_of_dg(shop: Path) -> None:
    """Guards the same where `dg` loads the project, and against a component that `dg` does not find."""
    made = dg_(shop, "scaffold", "defs", "outbox_pipelines.OutboxComponent", "orders")
    file = shop / "src" / "shop" / "defs" / "orders" / "defs.yaml"
    assert made.returncode == 0, made.stdout + made.stderr
    assert "dsn_variable: ORDERS_DSN" in file.read_text()
    _spoil(shop)
    # With several files of one type, Dagster 1.13 checks the last one only.
    checked = dg_(shop, "check", "yaml", "src/shop/defs/misspelled")
    assert checked.returncode != 0
    assert "'colour' was unexpected" in checked.stdout + checked.stderr
    loaded = dg_(shop, "check", "defs", "--no-check-yaml")
    said = loaded.stdout + loaded.stderr
    assert loaded.returncode == 0, said
    for _, line in WRONG.values():
        assert line in said
    assert "hunter2" not in said


def test_the_overview_of_outboxes_in_files_of_their_own(
    shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a project of many files without an overview, and one database under two names."""
    files = {
        "billing": ("OutboxComponent", "name: billing, dsn_variable: ONE_DSN"),
        "orders": ("OutboxComponent", "name: orders, dsn_variable: ONE_DSN"),
        "outboxes": ("OutboxesOverview", "automation: running"),
    }
    for name, (kind, attributes) in files.items():
        (shop / "src" / "shop" / "defs" / name).mkdir()
        file = shop / "src" / "shop" / "defs" / name / "defs.yaml"
        file.write_text(f"type: outbox_pipelines.{kind}\nattributes: {{{attributes}}}")
    monkeypatch.setenv("ONE_DSN", "host=127.0.0.1 port=1 dbname=shop")
    monkeypatch.syspath_prepend(str(shop / "src"))
    definitions = ComponentTree.for_project(shop).build_defs()
    [asset] = [spec for spec in definitions.resolve_all_asset_specs() if spec.key == dg.AssetKey("outboxes")]
    above = {dep.asset_key.to_user_string() for dep in asset.deps}
    assert above == {"outbox/billing/health", "outbox/orders/health"}
    [sensor] = [each for each in definitions.sensors or [] if each.name == "outboxes_overview"]
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    same = [line for line in caplog.messages if "have the same tables" in line]
    assert [line.split(" have")[0] for line in same] == ["billing and orders"]


VARIABLES = """
from datetime import timedelta
import dagster as dg

@dg.template_var
def daily() -> dg.FreshnessPolicy:
    return dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=30))
"""


def test_the_example_of_an_asset_downstream_of_a_component_works(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a page whose example does not load, and attributes of a file without an effect."""
    folder = shop / "src" / "shop" / "defs" / "orders"
    folder.mkdir()
    (folder / "variables.py").write_text(VARIABLES)
    (folder / "defs.yaml").write_text(
        "type: outbox_pipelines.OutboxComponent\n"
        "template_vars_module: .variables\n"
        "attributes:\n"
        "  name: orders\n"
        "  partition_start: '2026-11-01'\n"
        "  blocking_checks: [payloads_valid]\n"
        "  freshness_policy: '{{ daily }}'\n"
        "  automation_condition: \"{{ dg.AutomationCondition.on_cron('10 2 * * *') }}\"\n"
    )
    example = next(code for code in blocks("dagster.md", "Build on an archived day", "python")[1:])
    (shop / "src" / "shop" / "defs" / "revenue.py").write_text(
        "import dagster as dg\nfrom outbox_pipelines.defs import ArchiveResource, OutboxComponent\n\n"
        + example.replace("[revenue])", "[revenue], resources={'archive': ArchiveResource(url='/x')})")
    )
    monkeypatch.syspath_prepend(str(shop / "src"))
    definitions = ComponentTree.for_project(shop).build_defs()
    specs = {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}
    archive, revenue = specs["outbox/orders/archive"], specs["revenue"]
    assert [dep.asset_key for dep in revenue.deps] == [archive.key]
    assert revenue.partitions_def == archive.partitions_def
    assert archive.automation_condition == dg.AutomationCondition.on_cron("10 2 * * *")
    assert archive.freshness_policy == dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=30))
    checks = {spec.name: spec for each in definitions.asset_checks or () for spec in each.check_specs}
    assert {name for name, spec in checks.items() if spec.blocking} == {"payloads_valid"}


def test_the_other_examples_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a page whose file, subclass or definitions are refused."""
    page = (DOCS / "dagster.md").read_text()
    monkeypatch.setenv("ORDERS_DSN", "dbname=orders")
    monkeypatch.setenv("BILLING_DSN", "dbname=billing")
    [file] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    subclass, merged = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2])
    names: dict[str, Any] = {}
    run(subclass, names)
    made = names["ShopOutbox"].from_attributes_dict(attributes=yaml.safe_load(file)["attributes"])
    assert made.outbox().error is None
    specs = made.build_defs(ComponentTree.for_test().load_context).resolve_all_asset_specs()
    health = next(spec for spec in specs if spec.key.path[-1] == "health")
    assert health.metadata["runbook"] == "https://wiki.example.com/outbox"
    run(merged.replace("[...]", "[]"), names)
    keys = {spec.key.to_user_string() for spec in names["defs"].resolve_all_asset_specs()}
    assert {"outbox/orders/archive", "outbox/billing/archive"} <= keys


class Shown(OutboxComponent):
    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.merge_attributes(metadata={"runbook": "https://wiki.example.com"})


def test_translation_and_options() -> None:
    """Guards against an attribute that is accepted and has no effect, and a method that is not called."""
    component = Shown.from_attributes_dict(
        attributes={
            "name": "orders",
            "dsn_variable": "ORDERS_DSN",
            "partition_start": "2026-11-01",
            "parts": ["archive", "checks"],
            "automation": "running",
            "schedules": {"archive_days": "10 4 * * *"},
            "pool": "disk",
            "translation": {
                "key_prefix": ["shop", "events"],
                "group": "shop",
                "owners": ["ada@example.com"],
                "tags": {"team": "shop"},
            },
        }
    )
    definitions = component.build_defs(ComponentTree.for_test().load_context)
    specs = {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}
    assert set(specs) == {
        f"shop/events/{name}"
        for name in ("application/tables", "archive", "dropped", "events", "health", "relay")
    }
    archive = specs["shop/events/archive"]
    assert (archive.group_name, archive.owners, archive.tags["team"]) == ("shop", ["ada@example.com"], "shop")
    assert archive.metadata["runbook"] == "https://wiki.example.com"
    assert archive.partitions_def is not None
    assert archive.partitions_def.get_first_partition_key() == str(date(2026, 11, 1))
    schedule = definitions.resolve_schedule_def("outbox_orders_archive_days")
    assert schedule.cron_schedule == "10 4 * * *"
    [sensor] = list(definitions.sensors or ())
    assert (sensor.name, sensor.default_status) == ("outbox_orders_health", dg.DefaultSensorStatus.RUNNING)
    job = definitions.resolve_job_def("outbox_orders_archive_day")
    assert job.tags["team"] == "shop"
    assert {pool for node in job.nodes for pool in node.definition.pools} == {"disk"}
    assert "`outbox_orders_archive_days`" in str(archive.description)


def test_post_processing_reaches_the_jobs(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against jobs that keep the assets of before, since they were resolved before."""
    (shop / "src" / "shop" / "defs" / "orders").mkdir()
    (shop / "src" / "shop" / "defs" / "orders" / "defs.yaml").write_text(
        "type: outbox_pipelines.OutboxComponent\n"
        "attributes: {name: orders, dsn_variable: ORDERS_DSN, partition_start: '2026-11-01'}\n"
        "post_processing: {assets: [{target: '*', attributes: {tags: {cost: shop}}}]}\n"
    )
    monkeypatch.syspath_prepend(str(shop / "src"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        # Of another test's project.
        monkeypatch.delitem(sys.modules, name)
    definitions = ComponentTree.for_project(shop).build_defs()
    repository = definitions.get_repository_def()
    key = dg.AssetKey(["outbox", "orders", "archive"])
    assert repository.asset_graph.get(key).tags["cost"] == "shop"
    job = repository.get_job("outbox_orders_archive_day")
    assert job.asset_layer.asset_graph.get(key).tags["cost"] == "shop"


def test_parts_are_left_out_one_by_one() -> None:
    """Guards against pages full of jobs that have nothing to do."""
    everything, table = (outbox_definitions(serving(**settings)) for settings in (EVERYTHING, OF_TABLE))
    assert {"drain_inbox", "check_catalog", "expire_archive", "register_days", "sweep_bodies"} <= _names(
        everything
    )
    assert {"clean_table", "make_months"} <= _names(table)
    assert "outbox/inbox" in _keys(everything)
    usual = _names(outbox_definitions(serving()))
    assert {"relay_session", "dead_letters", "cutover", "purge_history"} <= usual
    assert not {"clean_table", "make_months", "drain_inbox", "check_catalog", "inbox", "sweep_bodies"} & usual
    assert not {"expire_archive", "register_days"} & usual
    for part in PARTS:
        of_table = part in ("clean_table", "make_months")
        rest = outbox_definitions(replace(serving(**(OF_TABLE if of_table else EVERYTHING)), without=[part]))
        whole = table if of_table else everything
        assert (_names(rest) | _keys(rest)) < (_names(whole) | _keys(whole)), part
    wrong = Outbox(name="orders", without=["alarms"])  # type: ignore[list-item]
    assert "attribute without: there is no part 'alarms'" in str(wrong.error)


def _names(definitions: dg.Definitions) -> set[str]:
    return {
        each.name
        for each in (
            *(definitions.jobs or ()),
            *(definitions.sensors or ()),
            *(definitions.schedules or ()),
        )
    }


def _keys(definitions: dg.Definitions) -> set[str]:
    graph = definitions.resolve_asset_graph()
    assets = {key.to_user_string() for key in graph.get_all_asset_keys()}
    return assets | {key.to_user_string() for key in graph.asset_check_keys}
