"""A wrong attribute of one outbox: the definitions load, and its own check and runs name it."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import Outbox, outbox_definitions
from outbox_pipelines.defs.attributes import SCHEDULES
from outbox_pipelines.errors import SetupError
from tests.defs.conftest import EVERYTHING, OF_TABLE, serving

WRONG: dict[str, list[Any]] = {
    "automation": ["run"],
    "group": ["my-group", ""],
    "key_prefix": [["a/b"], [], "shop", [""]],
    "owners": [["bob"], [""], "team:outbox"],
    "parts": [["rela"]],
    "partition_start": ["yesterday"],
    "pool": ["my pool"],
    "schedules": [{"archive_days": "61 * * * *"}, {"archive_days": "hourly"}, {"archiv_days": "1 * * * *"}],
    "tags": [{"a": 5}, {"a" * 70: "x"}, {"a": "x" * 300}, {"a": "x y"}, {"outbox/name": "other"}],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def test_a_wrong_attribute_is_an_error_of_its_outbox_alone() -> None:
    """Guards against a code location that does not load: nothing of any outbox would tick."""
    wrong = [
        Outbox(name=f"wrong_{number}", dsn_variable="UNUSED", **{name: value})
        for number, (name, value) in enumerate(CASES)
    ]
    repository = outbox_definitions(*wrong, Outbox(name="right")).get_repository_def()
    repository.load_all_definitions()
    for outbox, (name, _) in zip(wrong, CASES, strict=True):
        with pytest.raises(SetupError, match=f"^outbox {outbox.name}: attribute {name}: "):
            outbox.load_settings()
        assert repository.has_job(f"outbox_{outbox.name}_relay_session")


@pytest.mark.parametrize(
    "given",
    [
        {
            "key_prefix": ["my-shop", "orders.v1"],
            "group": "shop/orders",
            "owners": ["a@example.com", "team:a"],
        },
        {"tags": {"team/name": "a.b"}, "pool": "days", "schedules": {"archive_days": "*/5 2-4 * * 1"}},
    ],
)
def test_what_dagster_accepts_is_no_mistake(given: dict[str, Any]) -> None:
    """Guards against a rule of ours that is stricter than Dagster's."""
    outbox = Outbox(name="orders", **given)
    assert outbox.error is None
    outbox_definitions(outbox).get_repository_def().load_all_definitions()


def test_every_schedule_can_be_set() -> None:
    """Guards against a schedule whose name is an error."""
    both = [outbox_definitions(serving(**settings)) for settings in (EVERYTHING, OF_TABLE)]
    assert {each.name for one in both for each in one.schedules or ()} == set(SCHEDULES)


def test_outboxes_with_the_same_keys_are_both_there() -> None:
    """Guards against assets of one outbox that replace those of another."""
    twins = [Outbox(name=name, key_prefix=["shop"]) for name in ("orders", "billing")]
    keys = outbox_definitions(*twins).get_repository_def().asset_graph.get_all_asset_keys()
    assert {dg.AssetKey(["shop", "events"]), dg.AssetKey(["outbox", "billing", "events"])} <= keys
