"""Values of an existing table that are framed with the id of their schema."""

from __future__ import annotations

from pathlib import Path

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.catalog.subjects import Subjects
from outbox_pipelines.existing import table_measurements
from outbox_pipelines.quality.status_text import render
from tests.conftest import wait_until
from tests.existing.textbook import Table
from tests.registry import FakeRegistry

CATALOG = """
events:
  order.placed: {description: x, producer: x, owner: x, aggregate_type: order, schema: {type: object}}
"""


def _status(table: Table) -> str:
    return render(table_measurements.read(table.settings), [])


def test_a_registry_that_is_away_is_an_outage_and_then_rows_are_framed(
    table: Table, registry: FakeRegistry, tmp_path: Path
) -> None:
    """Guards against attempts that an outage takes, and a status that blames Kafka."""
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG)
    framed = table.with_(registry_url=registry.url, catalog_file=path, format="json_schema")
    [subject] = Subjects(read_catalog(path), framed.settings).of_event_types.values()
    registry.add(subject.name, subject.text)
    registry.fails = 503, ""
    framed.make_topic()
    framed.write(("a", {"n": 0}), ("b", {"n": 1}))
    with framed.relayed(breaker_seconds=0.5):
        wait_until(
            lambda: "waits for the schema registry, breaker open: the schema registry is" in _status(framed)
        )
        assert "reported by" in _status(framed)
        assert "UNAVAILABLE" not in _status(framed)
        registry.fails = None
        wait_until(lambda: len(framed.messages()) == 2)
        wait_until(lambda: "reachable" in _status(framed))
    assert [message.value for message in framed.messages()] == [f'\0\0\0\0\1{{"n": {n}}}' for n in (0, 1)]
    assert framed.rows("retry_count, last_error, published_at IS NOT NULL") == [(0, None, True)] * 2
