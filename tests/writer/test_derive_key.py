"""`derive_key`: equal content, equal key; nothing else."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import json
import math
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


def theirs(aggregate_id: object, event_type: str, payload: object) -> str:
    """What the guides print, to the letter."""
    content = f"{aggregate_id}:{event_type}:{json.dumps(payload, sort_keys=True)}"
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@pytest.mark.parametrize(
    "payload",
    [
        {},
        [],
        None,
        True,
        "text",
        -0.0,
        {"total": 5.0, "tax": 0.1 + 0.2, "large": 1e308, "small": 5e-324, "whole": 10**40, "no": -7},
        {"name": "Zoë Łukasz 漢字 🦆", "quote": '"\\/\b\n\u2028', "control": "\x01\x7f", "é": 1},
        {"b": {"z": [{"y": None, "x": (1, 2)}], "a": {}}, "a": [[], [[]], {"": ""}]},
        {2: "b", 10: "a", 1: "c"},
        {"1": True, "10": False, "9": "x"},
        {"kind": Kind.PLACED},
        [math.pi, 1e16, 1e-7, 100000.0, 123456789012345680.0],
    ],
)
@pytest.mark.parametrize(
    "aggregate_id", [7, "7", uuid.UUID(int=7), "order:7", "é 漢", decimal.Decimal("1.10")], ids=repr
)
def test_the_key_of_guides_is_theirs_to_the_letter(aggregate_id: object, payload: object) -> None:
    """Guards against a change of producer after which every retry is written twice."""
    key = derive_key(aggregate_id, "order.placed", payload, style="sha256-32")
    assert key == theirs(aggregate_id, "order.placed", payload)


def test_the_key_of_guides_never_changes() -> None:
    key = derive_key("7", "order.placed", {"a": 1, "b": [True, None, "é"]}, style="sha256-32")
    assert key == "2e2dfb5f54255264244d7e33a510b20b"


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (
            {"at": [datetime.datetime(2026, 1, 2)]},
            r"payload\.at\[0\] .* a datetime .* convert it to the text",
        ),
        ({"id": uuid.UUID(int=1)}, r"payload\.id .* a UUID has no JSON form in json\.dumps"),
        ({"sum": decimal.Decimal("1.10")}, r"payload\.sum .* a Decimal"),
        ({"tags": {"a"}}, r"payload\.tags .* a set"),
        ({1: "a", "b": 2}, "payload"),
        (float("inf"), "payload"),
        ("\0", "payload"),
    ],
    ids=repr,
)
def test_what_has_no_key_of_guides(payload: object, what: str) -> None:
    """Guards against a key that looks right, and that no other producer makes."""
    with pytest.raises(OutboxError, match=what):
        derive_key(1, "e", payload, style="sha256-32")


def test_names_that_have_no_key_of_guides() -> None:
    with pytest.raises(OutboxError, match="aggregate_id is an enum"):
        derive_key(Number.SEVEN, "e", {}, style="sha256-32")
    with pytest.raises(OutboxError, match="event_type is an enum"):
        derive_key(7, Kind.PLACED, {}, style="sha256-32")
    with pytest.raises(OutboxError, match="style is 'md5': give sha256 or sha256-32"):
        derive_key(7, "e", {}, style="md5")  # type: ignore[arg-type]
