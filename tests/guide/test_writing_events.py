"""docs/writing-events.md: every example runs, and prints what it says."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import re
import uuid

import pytest

from outbox_pipelines.writer.json_text import to_json
from tests.guide.guide import EXAMPLES, PATH, SQL, TEXT, Block, given, run
from tests.schema.servers import Database


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {example.line}")
def test_examples(database: Database, example: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an example that fails, or a failure that is no longer one."""
    with given(database, example) as names:
        run(example, names)
    assert capsys.readouterr().out.splitlines() == example.outcomes


def test_sql(database: Database) -> None:
    """Guards against statements for other languages that no longer fit the tables."""
    database.rows(SQL.source)
    assert database.rows("SELECT aggregate_id, event_type, idempotency_key FROM outbox ORDER BY seq") == [
        ("42", "order.placed", None),
        ("42", "order.placed", "request 7"),
        ("42", "order.placed", None),
    ]


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Address:
    city: str
    zip: str


NAMES = {
    "Decimal": decimal.Decimal,
    "UUID": uuid.UUID,
    "Color": Color,
    "Address": Address,
    **{name: getattr(datetime, name) for name in ("date", "datetime", "timedelta", "timezone")},
}
_TABLE = TEXT.partition("| Python | JSON |")[2].partition("\n\n")[0]
TYPES = re.findall(r"^\| `(.*)` \| `(.*?)`", _TABLE, re.MULTILINE)


@pytest.mark.parametrize(("python", "json"), TYPES)
def test_types(python: str, json: str) -> None:
    """Guards against a table of types that does not match the code."""
    assert to_json("payload", eval(python, dict(NAMES))) == json


def test_nothing_is_left_out() -> None:
    """Guards against untested examples, outcomes or rows that the patterns above do not find."""
    assert 1 + len(EXAMPLES) == TEXT.count("```python")
    assert sum(len(example.outcomes) for example in EXAMPLES) == TEXT.count("# → ")
    assert len(TYPES) == 7


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", TEXT))
def test_links(link: str) -> None:
    """Guards against a link to a page that was moved."""
    assert (PATH.parent / link.partition("#")[0]).exists()
