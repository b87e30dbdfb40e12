"""What the event catalog says about members that are encrypted for a person."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.catalog.document import Catalog, EventType
from outbox_pipelines.catalog.page import markdown

TEXT = {"type": "string", "description": "of a person"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "email": TEXT,
        "nick": {"type": ["string", "null"], "minLength": 1},
        "id": {"type": "integer"},
        "born": {"type": "string", "format": "date"},
        "short": {"type": "string", "maxLength": 100},
        "customer": {"$ref": "#/$defs/customer"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/customer"}},
        "texts": {"type": "array", "items": TEXT},
    },
    "$defs": {"customer": {"type": "object", "properties": {"name": TEXT, "id": {"type": "string"}}}},
}


def made(protected: dict[str, str], schema: Any = SCHEMA) -> EventType:
    return EventType.model_validate(
        {"description": "d", "producer": "p", "owner": "o", "schema": schema, "protected": protected}
    )


def test_what_can_be_protected() -> None:
    """Guards against a catalog that refuses a member that may be any text, or does not show it."""
    event_type = made(
        {
            **{"email": "id", "nick": "aggregate_id", "customer.name": "customer.id"},
            **{"lines[].name": "lines[].id", "texts[]": "id"},
        }
    )
    shown = markdown(Catalog(events={"order.placed": event_type}))
    assert "- encrypted for a person: `email`, `nick`, `customer.name`, `lines[].name`, `texts[]`" in shown


@pytest.mark.parametrize(
    ("path", "subject", "why"),
    [
        ("emial", "id", "protected emial is not in its schema: correct the path"),
        ("customer.email", "id", r"protected customer\.email is not in its schema"),
        ("lines.name", "id", r"protected lines\.name is not in its schema"),
        ("born", "id", "protected born has format in its schema, which no encrypted value fits: remove it"),
        ("short", "id", "protected short has maxLength in its schema"),
        ("id", "aggregate_id", "protected id has the type 'integer': an encrypted value is a string"),
        ("customer", "id", "protected customer has the type 'object'"),
        ("email", "customer_id", "names the subject customer_id, which is not in its schema"),
        ("email", "lines[].id", r"cannot have the subject lines\[\]\.id: name a member in clear"),
        ("email", "email", "cannot have the subject email"),
    ],
)
def test_what_cannot(path: str, subject: str, why: str) -> None:
    """Guards against a member in clear by a misspelled path, and a schema that refuses encrypted values."""
    with pytest.raises(ValueError, match=why):
        made({path: subject})
    with pytest.raises(ValueError, match="is not in its schema"):
        made({path: subject}, None)
