"""Topics as assets: documented ones, and those that relay sessions have sent to."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.topics import topic_key, topics
from tests.catalog.conftest import CATALOG
from tests.conftest import Outbox
from tests.defs.conftest import metadata_of, observed, run, serving


def found() -> dict[str, dg.AssetSpec]:
    return {spec.key.path[1]: spec for spec in topics(serving())}


def test_a_documented_topic_says_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a lineage that ends at the relay, and owners that are named in a file alone."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    (tmp_path / "catalog.yaml").write_text(
        CATALOG.replace("owner: ada@example.com", "owner: Ada, room 3\n    topic: order-events")
    )
    monkeypatch.setenv("OUTBOX_CATALOG_FILE", str(tmp_path / "catalog.yaml"))
    [topic] = found().values()
    assert topic.key == topic_key(serving(), "order-events")
    assert [dep.asset_key for dep in topic.deps] == [dg.AssetKey(["outbox", "relay"])]
    assert (topic.group_name, topic.kinds) == ("topics", {"kafka"})
    # Dagster refuses an owner that is neither an e-mail address nor a team.
    assert topic.owners == ["team:orders"]
    assert (
        "- `order.placed` (active): A customer has placed an order. From shop, for billing, shipping; owner: "
        in (topic.description or "")
    )
    assert "owner: Ada, room 3." in (topic.description or "")
    assert "| `total` | integer | yes | In cents. |" in str(topic.metadata["event_types"].value)


def test_topics_that_were_seen_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against topics that need a complete event catalog, and names that clash as Python's."""
    monkeypatch.delenv("OUTBOX_CATALOG_FILE", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    names = {"a.order-events", "a_order_events", "a-order_events"}
    with dg.DagsterInstance.get() as instance:
        for name in names:
            instance.report_runless_asset_event(dg.AssetObservation(topic_key(serving(), name)))
        instance.report_runless_asset_event(dg.AssetObservation(dg.AssetKey(["other", "topic"])))
    assert found().keys() == names
    loaded = dg.Definitions(assets=topics(serving())).get_repository_def()
    assert loaded.asset_graph.get_all_asset_keys() >= {topic_key(serving(), name) for name in names}


@pytest.mark.parametrize(
    "environment",
    [
        {"OUTBOX_CATALOG_FILE": "/none.yaml"},
        {"DAGSTER_HOME": "/none"},
        {"OUTBOX_CATALOG_FILE": "x", "OUTBOX_VALUE_FORMAT": "x"},
    ],
)
def test_definitions_load_whatever_is_wrong(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a Dagster in which nothing can be run because a file is missing, or a setting wrong."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert found() == {}


def test_a_session_reports_the_topics_it_sends_to(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served
) -> None:
    """Guards against topics that are not shown before they are documented; and wrong counts."""
    outbox.write("a", "b")
    result, _ = run("relay_once", instance, served)
    [observation] = observed(instance, result.run_id, topics=True)
    assert observation.asset_key == topic_key(serving(), outbox.topic("order"))
    assert metadata_of(observation) == {"session_events": 2}
    assert instance.get_asset_keys(prefix=["topic"]) == [observation.asset_key]


def test_of_several_topics_no_count_is_guessed(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served
) -> None:
    """Guards against a session's whole count at each of its topics; and a session that sends nothing."""
    idle, _ = run("relay_once", instance, served)
    assert observed(instance, idle.run_id, topics=True) == []
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "VALUES ('order', '1', 'e', '{}'), ('parcel', '1', 'e', '{}')"
        )
    result, _ = run("relay_once", instance, served)
    seen = {each.asset_key: metadata_of(each) for each in observed(instance, result.run_id, topics=True)}
    assert seen == {
        topic_key(serving(), outbox.topic("order")): {},
        topic_key(serving(), outbox.topic("parcel")): {},
    }
