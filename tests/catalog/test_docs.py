"""docs/catalog.md: its example is an event catalog, and the commands print what it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import psycopg
import pytest

from outbox_pipelines.catalog import validator
from outbox_pipelines.catalog.classes import classes
from outbox_pipelines.catalog.document import EventType, read_catalog
from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.writer import InvalidEventError, emit, validate_with
from outbox_pipelines.writer.testing import captured
from tests.catalog.conftest import Write
from tests.schema.events import insert
from tests.schema.servers import Database

TEXT = (Path(__file__).parents[2] / "docs" / "catalog.md").read_text()
[EXAMPLE] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")


def test_check_prints_what_is_shown(database: Database, write: Write) -> None:
    """Guards against a page that shows another command."""
    with database.connect() as connection:
        for event_type in ("order.placed", "order.placed", "order.shipped", "order.refunded"):
            insert(connection, event_type=event_type)
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=str(write(EXAMPLE)))
    assert _TIME.sub("…", done.stdout + done.stderr) in _TIME.sub("…", TEXT)


def test_a_mistake_prints_what_is_shown(database: Database, write: Write) -> None:
    """Guards against an error that says less than is promised."""
    path = str(write(EXAMPLE.replace("lifecycle: deprecated", "lifecycle: old")))
    done = database.outbox("catalog", "check", OUTBOX_CATALOG_FILE=path)
    assert done.exit_code == 2
    assert done.stderr.replace(path, "catalog.yaml") in TEXT


CLASSES = """events:
  order.placed:
    {description: d, producer: p, owner: o, aggregate_type: order, aggregate_id: order_id, schema:
     {type: object, required: [order_id, total],
      properties: {order_id: {type: integer}, total: {type: integer}}}}
  order.shipped: {description: d, producer: p, owner: o, aggregate_type: order, schema: {type: object}}
"""


def test_the_classes_and_the_check_are_used_as_shown(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against examples that fail."""
    monkeypatch.chdir(write(CLASSES).parent)
    # pydantic looks for its names there.
    made = ModuleType("generated_events")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(classes(read_catalog(Path("catalog.yaml"))), made.__dict__)
    consumer = Consumer(source="s", topics=["t"], kafka={"bootstrap.servers": "broker:9092"}, dsn="")
    names = {"emit": emit, "connection": None, "consumer": consumer, "Event": Event, "psycopg": psycopg}
    with captured() as events:
        try:
            for example in re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
                exec(compile(example, "example", "exec", dont_inherit=True), {**vars(made), **names})
            with pytest.raises(InvalidEventError, match="'total' is a required property"):
                cast("Any", emit)(None, "order", 42, "order.placed", {"order_id": 42})
        finally:
            validate_with(None)
    assert [(each.event_type, each.aggregate_id) for each in events] == [
        ("order.placed", "42"),
        ("order.shipped", "42"),
    ]


def test_a_refusal_says_what_is_shown(write: Write) -> None:
    """Guards against a message that has changed."""
    payload = {"total": 1, "currency": "EUR", "lines": [{"sku": "a"}]}
    with pytest.raises(ValueError, match="pieces") as refused:
        validator(write(EXAMPLE))("order.placed", payload, None)
    assert f"order.placed: {refused.value}" in TEXT


def test_the_formats_that_are_promised_are_checked(write: Write) -> None:
    """Guards against a format that needs a package which is not installed."""
    wrong = dict.fromkeys(("date-time", "date", "time", "email", "ipv4", "ipv6", "uuid"), "no such thing(")
    wrong["regex"] = "("
    wrong["email"] = "nobody"
    for name, value in wrong.items():
        assert f"`{name}`" in TEXT
        properties = f"{{type: object, properties: {{a: {{format: {name}}}}}}}"
        check = validator(
            write(f"events: {{e: {{description: d, producer: p, owner: o, schema: {properties}}}}}")
        )
        with pytest.raises(ValueError, match=f"is not a '{name}'"):
            check("e", {"a": value}, None)


def test_every_entry_is_described() -> None:
    """Guards against an entry that only the code knows."""
    for name, field in EventType.model_fields.items():
        assert f"| `{field.alias or name}` |" in TEXT
