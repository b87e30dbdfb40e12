"""`derive_key`: equal content, equal key; nothing else."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from typing import Any

import pytest

from outbox_pipelines.writer import OutboxError, derive_key


class Kind(str, enum.Enum):  # noqa: UP042
    PLACED = "order.placed"


class Number(enum.Enum):
    SEVEN = "7"


KEY = derive_key("7", "order.placed", {"a": 1, "b": [True, None, "é"]})


def test_it_never_changes() -> None:
    """Guards against a release that derives other keys: every retry across the deployment is written
    twice."""
    assert KEY == "9b78dee83ee3a75a0c82d482d32d3d6112ac642977282f22e97586549e4ea80c"


@pytest.mark.parametrize(
    "arguments",
    [
        ("7", "order.placed", {"b": [True, None, "é"], "a": 1}),
        (7, "order.placed", {"b": (True, None, "é"), "a": 1}),
        (Number.SEVEN, Kind.PLACED, {"b": [True, None, "é"], "a": 1}),
    ],
)
def test_the_same_content_has_the_same_key(arguments: tuple[Any, ...]) -> None:
    """Guards against another key for a retry with another order of members, or with a number as id."""
    assert derive_key(*arguments) == KEY


def test_other_content_has_another_key() -> None:
    """Guards against two events merged into one: parts joined without a separator, or one left out."""
    others: list[tuple[Any, ...]] = [
        ("7", "order.placed", {}),
        ("7o", "rder.placed", {}),
        ("7", "order.placed", []),
        ("7", "order.placed", None),
        ("7", "order.placed", {"a": 1}),
        ("7", "order.placed", {"a": "1"}),
        ("7", "order.placed", {"a": 1.0}),
        ("8", "order.placed", {}),
        ('7","order.placed', "e", {}),
    ]
    keys = {derive_key(*arguments) for arguments in others}
    assert len(keys) == 9


def test_values_count_as_in_a_payload() -> None:
    """Guards against a payload that can be written, and has no key."""
    values = {"at": datetime.date(2026, 1, 2), "id": uuid.UUID(int=1), "sum": decimal.Decimal("1.10")}
    texts = {name: str(value) for name, value in values.items()}
    assert derive_key(1, "e", values) == derive_key(1, "e", texts)
    assert derive_key(1, "e", {"b", "a"}) == derive_key(1, "e", ["a", "b"])


@pytest.mark.parametrize("payload", [{1: "a", "b": 2}, float("nan"), b"x", object(), "\0"])
def test_what_has_no_key(payload: object) -> None:
    """Guards against a TypeError from library code, and a key of a text that no other process writes."""
    with pytest.raises(OutboxError, match="payload"):
        derive_key(1, "e", payload)
