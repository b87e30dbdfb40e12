"""The current definitions go on with what a release has left in Dagster's storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import dagster as dg
import pytest

from outbox_pipelines.defs import alerts, health, overview, runs
from outbox_pipelines.defs.dagster_internals import completed_results
from outbox_pipelines.defs.places import SHARD
from outbox_pipelines.defs.relay import sensors
from tests.conftest import Outbox, session
from tests.defs.test_history import age, purge
from tests.quality.receivers import Webhook
from tests.releases import dagster_storage, dump
from tests.releases.dagster_storage import alerted, hooked, run, served, tick
from tests.releases.test_upgrade import migrate_all

pytestmark = [pytest.mark.slow, pytest.mark.extended]

_DAYS: Final = "SELECT state, day FROM outbox_days WHERE state <> 'open'"


@pytest.fixture
def instance(release: str, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """The release's instance, after what `dagster instance migrate` does."""
    dagster_storage.restore(dump.FOLDER / release / "dagster", tmp_path / "dagster")
    with dagster_storage.opened(tmp_path / "dagster") as found:
        found.upgrade()
        yield found


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with hooked() as posted:
        yield posted


def test_history_is_shown(installed: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against an asset, a check or a tag with another name, whose history ends there."""
    migrate_all(installed)
    ours = served(installed)
    day = {state: str(found) for state, found in installed.rows(_DAYS)}
    topic = ours.outer_key("topic", f"{dump.TOPICS}-order-events")
    assert {*instance.get_asset_keys()} - runs.assets(ours) == {topic}
    archive, reconciliation = ours.key("archive"), ours.key("reconciliation")
    [archived] = instance.fetch_materializations(archive, limit=9).records
    assert archived.partition_key == day["archived"]
    [reconciled] = instance.fetch_materializations(reconciliation, limit=9).records
    assert reconciled.partition_key == day["closed"]
    # The newest are of a run that failed before its checks.
    results = {key: record for key in runs.checks(ours) for record in completed_results(instance, key, 2)}
    assert results[dg.AssetCheckKey(archive, "archive_equals_table")].partition == day["archived"]
    assert results[dg.AssetCheckKey(reconciliation, "nothing_is_lost")].partition == day["closed"]
    assert dg.AssetCheckKey(ours.key("health"), "dead_letters") in results
    [row] = overview.rows(instance, [ours], dagster_storage.last_tick(instance) + 60)
    assert row["state"] == "ERROR"
    assert (
        row["dead_letters"]
        == installed.rows("SELECT count(*) FROM outbox_parked WHERE state = 'failed'")[0][0]
    )


def test_sensors_continue(
    installed: Outbox, instance: dg.DagsterInstance, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against alerts that are sent again, or never resolved; and a pause that an upgrade forgets."""
    migrate_all(installed)
    ours = served(installed)
    at = dagster_storage.last_tick(instance) + 5
    for module in (alerts, health, sensors):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: at))
    reported = tick(instance, ours, "health").asset_events
    names = {each.check_name for each in reported if isinstance(each, dg.AssetCheckEvaluation)}
    assert "dead_letters" not in names
    day = dict(installed.rows(_DAYS))
    failed = f"failed run of archive_day {day['closed']}"
    tick(instance, ours, "alerts")
    assert not {"dead_letters", failed} & alerted(hook)
    # Those of shard 0 have failed quickly.
    launched = tick(instance, ours, "relay_supervisor").run_requests or []
    assert [request.tags[SHARD] for request in launched] == ["1"]
    session(installed.settings.dsn).execute("DELETE FROM outbox_parked")
    assert run(instance, served(installed, archive=installed.settings.archive), "archive_day", day["closed"])
    for _ in range(2):
        tick(instance, ours, "alerts")
    assert {"dead_letters resolved", f"{failed} resolved"} <= alerted(hook)


def test_old_runs_go(release: str, instance: dg.DagsterInstance) -> None:
    """Guards against runs of older versions that no nightly job finds."""
    age(instance, 15)
    # The newest run of each job stays.
    assert purge(instance, **dagster_storage.HERE)["runs"] == len(["relay_once", "relay_session"])
