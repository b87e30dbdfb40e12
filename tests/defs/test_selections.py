"""Selections of a user's jobs that contain assets of an outbox, up- and downstream."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import Outbox, outbox_definitions
from tests.defs.conftest import EVERYTHING

pytestmark = pytest.mark.slow

ORDERS = Outbox(name="orders", settings={**EVERYTHING, "dsn": "host=127.0.0.1 port=1"})
PARTS = (
    *("application/tables", "archive", "connector", "dropped", "events", "health", "inbox"),
    *("reconciliation", "relay", "replays"),
)


@pytest.fixture(scope="module")
def parts() -> list[dg.Definitions]:
    @dg.asset(deps=[ORDERS.key("archive")], partitions_def=ORDERS.days)
    def report() -> None: ...

    @dg.asset(deps=[report])
    def dashboard() -> None: ...

    return [outbox_definitions(ORDERS), dg.Definitions(assets=[report, dashboard])]


def selected(parts: list[dg.Definitions], selection: Any) -> set[str]:
    """The assets of a job that has this selection."""
    job = dg.define_asset_job("mine", selection=selection)
    made = dg.Definitions.merge(*parts, dg.Definitions(jobs=[job])).resolve_job_def("mine")
    return {key.to_user_string() for key in made.asset_layer.selected_asset_keys}


def test_every_asset_is_selected_below(parts: list[dg.Definitions]) -> None:
    """Guards against a new asset that is not tried."""
    keys = {spec.key.to_user_string() for spec in parts[0].resolve_all_asset_specs()}
    assert keys == {f"outbox/orders/{name}" for name in PARTS}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("form", ['key:"{}"', 'key:"{}"+', '+key:"{}"', '+key:"{}"+'])
def test_a_selection_of_what_can_run(parts: list[dg.Definitions], name: str, form: str) -> None:
    """Guards against the documented form of a selection around an asset of an outbox."""
    text = form.format(f"outbox/orders/{name}")
    found = selected(parts, dg.AssetSelection.from_string(text).materializable())
    assert found <= {
        "report",
        "dashboard",
        *(f"outbox/orders/{name}" for name in ("archive", "reconciliation")),
    }


def test_the_users_assets_downstream_of_an_archived_day(parts: list[dg.Definitions]) -> None:
    """Guards against the documented string, for schedules and automation in YAML."""
    assert selected(parts, 'key:"outbox/orders/archive"+ and not group:"outbox_orders"') == {
        "report",
        "dashboard",
    }
    assert selected(parts, 'key:"outbox/orders/archive"+1 and not group:"outbox_orders"') == {"report"}


def test_what_dagster_refuses(parts: list[dg.Definitions]) -> None:
    """Guards against advice that is no longer needed."""
    with pytest.raises(dg.DagsterInvalidDefinitionError) as error:
        selected(parts, 'key:"outbox/orders/archive"+')
    assert "subset of existing executable asset keys" in f"{error.value} {error.value.__cause__}"
