"""Kafka's clients of the tests, and of the package."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parents[1]


def test_no_admin_client_is_asked_for_a_groups_offsets() -> None:
    """Guards against a process that is ended by confluentinc/librdkafka#5040: a consumer can ask instead."""
    asking = [
        path
        for folder in ("outbox_pipelines", "tests", "examples", "benchmarks")
        for path in _ROOT.joinpath(folder).rglob("*.py")
        if ".list_consumer_group" + "_offsets(" in path.read_text()
    ]
    assert asking == []
