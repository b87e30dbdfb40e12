"""Views beside `events`: members of payloads as columns, and the last event of each aggregate."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.days.archive import Archive, open_archive
from outbox_pipelines.writer.references import Reference
from tests.days.archive.reading import ONE, event, put_day
from tests.days.archive.test_query import ask

CATALOG = """
events:
  order.placed:
    description: Placed.
    producer: shop
    owner: team:orders
    schema:
      type: object
      required: [total]
      properties:
        total: {type: integer}
        price: {type: number}
        placed_at: {type: string, format: date-time}
        due: {type: string, format: date}
        paid: {type: [boolean, "null"]}
        currency: {enum: [EUR, NOK]}
        id: {type: string}
        $ref: {type: string}
        buyer: {type: object, properties: {name: {type: string}, since: {type: string, format: date}}}
        lines: {type: array, items: {$ref: "#/$defs/line"}}
        tags: {type: array, items: {type: string}}
        any: {}
        either: {type: [string, integer]}
        cased: {type: object, properties: {a: {type: string}, A: {type: string}}}
      $defs:
        line: {type: object, properties: {sku: {type: string}, pieces: {type: integer}}}
  it's "odd":
    description: Odd.
    producer: shop
    owner: team:orders
    schema: {properties: {"it's": {type: integer}}}
  Events:
    description: The name of a view.
    producer: shop
    owner: team:orders
    schema: {properties: {n: {type: integer}}}
  order.noted:
    description: Without a schema.
    producer: shop
    owner: team:orders
"""
PAYLOAD: dict[str, Any] = {
    "total": 5,
    "price": 0.1,
    "placed_at": "2013-01-01T10:00:00+02:00",
    "due": "2013-02-01",
    "paid": None,
    "currency": "EUR",
    "id": "theirs",
    "$ref": "r",
    "buyer": {"name": "Ada", "since": "2012-01-01"},
    "lines": [{"sku": "a", "pieces": 2}, {"sku": "b", "pieces": "no number"}],
    "tags": ["x", None],
    "any": {"k": [1]},
    "either": 7,
    "cased": {"a": "1", "A": "2"},
}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """One day: a complete order, one that fits nothing, and types with odd names."""

    def made(seq: int, event_type: str, payload: object, aggregate_id: str = "1") -> dict[str, Any]:
        values = {"event_type": event_type, "payload": json.dumps(payload), "aggregate_id": aggregate_id}
        return {**event(ONE, seq), **values}

    put_day(
        tmp_path / "archive",
        ONE,
        [
            made(1, "order.placed", PAYLOAD),
            made(2, "order.placed", ["no object"]),
            made(3, 'it\'s "odd"', {"it's": 3}, "2"),
            made(4, "Events", {"n": 4}, "3"),
            made(5, "order.noted", {}, "2"),
        ],
    )
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return open_archive(str(tmp_path / "archive"), catalog=read_catalog(tmp_path / "catalog.yaml"))


def test_members_are_typed_columns(archive: Archive) -> None:
    """Guards against members that are read as texts, nested ones that are lost, and names that collide."""
    asked = archive.query('SELECT * FROM "order.placed" ORDER BY seq')
    kinds = dict(zip(asked.columns, map(str, asked.types), strict=True))
    assert {name: kinds[name] for name in ("total", "price", "placed_at", "due", "paid", "lines")} == {
        "total": "BIGINT",
        "price": "DOUBLE",
        "placed_at": "TIMESTAMP WITH TIME ZONE",
        "due": "DATE",
        "paid": "BOOLEAN",
        "lines": "STRUCT(sku VARCHAR, pieces BIGINT)[]",
    }
    whole, odd = (dict(zip(asked.columns, row, strict=True)) for row in asked.fetchall())
    assert (whole["total"], whole["price"], whole["currency"], whole["paid"]) == (5, 0.1, "EUR", None)
    assert whole["placed_at"].astimezone(UTC) == datetime(2013, 1, 1, 8, tzinfo=UTC)
    assert (whole["id_"], whole["$ref"]) == ("theirs", "r")
    assert whole["id"] != "theirs"
    assert whole["buyer"]["name"] == "Ada"
    assert whole["lines"] == [{"sku": "a", "pieces": 2}, {"sku": "b", "pieces": None}]
    assert (whole["tags"], json.loads(whole["any"]), json.loads(whole["either"])) == (
        ["x", None],
        {"k": [1]},
        7,
    )
    assert json.loads(whole["cased"]) == {"a": "1", "A": "2"}
    assert json.loads(whole["payload"]) == PAYLOAD
    assert (odd["total"], odd["lines"]) == (None, None)


def test_a_reference_has_no_members(tmp_path: Path) -> None:
    """Guards against a view that a large payload breaks, and one without its event."""
    reference = Reference("2026-03-01/x", 1, "0" * 64).payload()
    put_day(tmp_path / "archive", ONE, [event(ONE, 1) | {"event_type": "order.placed", "payload": reference}])
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    archive = open_archive(str(tmp_path / "archive"), catalog=read_catalog(tmp_path / "catalog.yaml"))
    assert archive.query('SELECT total, buyer, payload FROM "order.placed"').fetchall() == [
        (None, None, reference)
    ]


def test_names_of_event_types(archive: Archive) -> None:
    """Guards against a type that replaces `events`, or cannot be quoted."""
    assert archive.query("""SELECT "it's" FROM "it's ""odd\"\"\"""").fetchall() == [(3,)]
    assert archive.query('SELECT n FROM "Events_"').fetchall() == [(4,)]
    assert archive.query("SELECT count(*) FROM events").fetchall() == [(5,)]
    with pytest.raises(duckdb.CatalogException):
        archive.query('SELECT * FROM "order.noted"')


def test_the_latest_of_each_aggregate(archive: Archive) -> None:
    """Guards against the first event, or that of another aggregate."""
    asked = archive.query("SELECT aggregate_id, seq FROM latest ORDER BY aggregate_id")
    assert asked.fetchall() == [("1", 2), ("2", 5), ("3", 4)]


def test_the_command_has_them(archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against views for programs alone, and a catalog whose mistake ends every query."""
    root, file = tmp_path / "archive", tmp_path / "catalog.yaml"
    sql = 'SELECT total FROM "order.placed" WHERE total IS NOT NULL'
    assert "no views" not in ask(root, sql, catalog_file=str(file)).stderr
    assert ask(root, sql, "--csv", catalog_file=str(file)).stdout == "total\n5\n"
    file.write_text("events: {}")
    done = ask(root, "SELECT count(*) AS n FROM events", "--csv", catalog_file=str(file))
    assert (done.exit_code, done.stdout) == (0, "n\n5\n")
    assert "no views of event types: OUTBOX_CATALOG_FILE=" in done.stderr


def test_an_earlier_version_has_a_view_of_its_own(tmp_path: Path) -> None:
    """Guards against members of an earlier version that no view types, and events that a view leaves out."""
    earlier = "version: 2\n    versions: {1: {properties: {total: {type: string}, note: {type: string}}}}"
    (tmp_path / "catalog.yaml").write_text(CATALOG.replace("schema:", f"{earlier}\n    schema:", 1))
    rows = [
        event(ONE, seq) | {"event_type": "order.placed", "payload": json.dumps(payload), "version": version}
        for seq, version, payload in (
            *((1, 1, {"total": "five", "note": "x"}), (2, 2, {"total": 6}), (3, None, {"total": 7})),
        )
    ]
    put_day(tmp_path / "archive", ONE, rows)
    archive = open_archive(str(tmp_path / "archive"), catalog=read_catalog(tmp_path / "catalog.yaml"))
    assert archive.query('SELECT total, note FROM "order.placed@1"').fetchall() == [("five", "x")]
    assert archive.query('SELECT total FROM "order.placed" ORDER BY seq').fetchall() == [(None,), (6,), (7,)]
