"""What Python's values become in a payload, and which have no place there."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import attrs
import pydantic
import pytest

from outbox_pipelines.writer import OutboxError, emit
from outbox_pipelines.writer.json_text import to_json
from tests.schema.events import one
from tests.schema.servers import Connection

UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))


class Color(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    LARGE = 3


class State(str, enum.Enum):  # noqa: UP042
    OPEN = "open"


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(slots=True)
class Line:
    sku: str
    price: decimal.Decimal
    kind: ClassVar[str] = "line"


@dataclasses.dataclass
class Order:
    lines: list[Line]
    at: datetime.date
    hint: dataclasses.InitVar[int] = 0


@attrs.define
class Parcel:
    id: uuid.UUID
    _weight: int


class Customer(pydantic.BaseModel):
    id: uuid.UUID
    since: datetime.datetime
    balance: decimal.Decimal


CASES: dict[str, tuple[object, object]] = {
    "aware": (datetime.datetime(2026, 1, 2, 3, 4, 5, 6, EAST), "2026-01-02T03:04:05.000006+05:30"),
    "utc": (datetime.datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
    "naive": (datetime.datetime(2026, 1, 2), "2026-01-02T00:00:00"),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "time": (datetime.time(3, 4, 5), "03:04:05"),
    "timedelta": (datetime.timedelta(days=1, seconds=90, microseconds=500_000), "PT86490.5S"),
    "negative timedelta": (datetime.timedelta(microseconds=-1), "-PT0.000001S"),
    "no time": (datetime.timedelta(), "PT0S"),
    "decimal": (decimal.Decimal("12345678901234567890.10"), "12345678901234567890.10"),
    "uuid": (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    "enum": (Color.RED, "red"),
    "int enum": (Size.LARGE, 3),
    "str enum": (State.OPEN, "open"),
    "enum as name": ({State.OPEN: 1}, {"open": 1}),
    "int as name": ({5: "a", None: "b", True: "c"}, {"5": "a", "null": "b", "true": "c"}),
    "tuple": ((1, (2,)), [1, [2]]),
    "named tuple": (Point(1, 2), [1, 2]),
    "set": ({"b", "a", "c"}, ["a", "b", "c"]),
    "frozenset": (frozenset({2, 10}), [10, 2]),
    "mapping": (types.MappingProxyType({"a": 1}), {"a": 1}),
    "ordered": (collections.OrderedDict(a=1), {"a": 1}),
    "dataclass": (
        Order([Line("a", decimal.Decimal("1.10"))], datetime.date(2026, 1, 2)),
        {"lines": [{"sku": "a", "price": "1.10"}], "at": "2026-01-02"},
    ),
    "attrs": (Parcel(uuid.UUID(int=1), 5), {"id": str(uuid.UUID(int=1)), "_weight": 5}),
    "pydantic": (
        Customer(id=uuid.UUID(int=1), since=datetime.datetime(2026, 1, 2), balance=decimal.Decimal("1.10")),
        {"id": str(uuid.UUID(int=1)), "since": "2026-01-02T00:00:00", "balance": "1.10"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_becomes(connection: Connection, case: str) -> None:
    """Guards against common values that are refused, or written so that a reader gets them wrong."""
    value, becomes = CASES[case]
    emit(connection, "order", 1, "e", {"deep": [value]}, headers={"h": value})
    assert one(connection, "SELECT payload, headers FROM outbox") == ({"deep": [becomes]}, {"h": becomes})
    connection.execute("SAVEPOINT only_payload")
    emit(connection, "order", 1, "alone", value)
    assert one(connection, "SELECT payload FROM outbox WHERE event_type = 'alone'") == (becomes,)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (12345678901234567890123456789, "12345678901234567890123456789"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e300, f"1{'0' * 300}"),
        (5e-324, f"0.{'0' * 323}5"),
        (-0.0, "0.0"),
        (1.10, "1.1"),
    ],
)
def test_numbers_keep_their_digits(connection: Connection, value: float, stored: str) -> None:
    """Guards against a number that is converted to a float, or to another one, before it is stored."""
    emit(connection, "order", 1, "e", [value])
    assert one(connection, "SELECT payload #>> '{0}' FROM outbox") == (stored,)


def numbers() -> Iterator[int]:
    yield 1


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
DEEP: list[object] = []
for _ in range(100_000):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[object, str]] = {
    "bytes": (b"{}", "bytes have no JSON form: decode them, or send base64"),
    "bytearray": (bytearray(b"{}"), "bytearray have no JSON form"),
    "generator": (numbers(), "generator can be read only once: convert it to a list"),
    "iterator": (iter([1]), "list_iterator can be read only once: convert it to a list"),
    "object": (object(), "object has no JSON form"),
    "class of pydantic": (Customer, "has no JSON form"),
    "dataclass itself": (Order, "has no JSON form"),
    "tuple as name": ({("a", "b"): 1}, "keys must be"),
    "uuid as name": ({uuid.UUID(int=1): 1}, "keys must be"),
    "nan": (float("nan"), "not JSON compliant"),
    "infinity": ([float("inf")], "not JSON compliant"),
    "nan as name": ({float("nan"): 1}, "not JSON compliant"),
    "nan as decimal": (decimal.Decimal("NaN"), "NaN is a missing value"),
    "infinity as decimal": (decimal.Decimal("-Infinity"), "Infinity is not a JSON number"),
    "circle": (CIRCLE, "Circular"),
    "too deep": (DEEP, "recursion"),
    "complex": (1j, "complex has no JSON form"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("where", ["payload", "headers"])
def test_it_is_refused(connection: Connection, case: str, where: str) -> None:
    """Guards against NaN, which Python writes and no consumer reads; a TypeError without a place."""
    value, why = REFUSED[case]
    content: dict[str, Any] = {"payload": {}, where: {"x": value}}
    with pytest.raises(OutboxError, match=rf"{where}\.x[^ ]* does not serialize to JSON: .*{why}"):
        emit(connection, "order", 1, "e", **content)
    assert one(connection, "SELECT count(*) FROM outbox") == (0,)


class Priced(pydantic.BaseModel):
    unit_price: int = pydantic.Field(alias="unitPrice", default=1)


class Aliased(Priced):
    model_config = pydantic.ConfigDict(serialize_by_alias=True)


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ({"lines": [{"price": 1}, {"price": object()}]}, r"payload\.lines\[1\]\.price"),
        ([{"a-b": {1: (0, b"")}}], r"payload\[0\]\['a-b'\]\[1\]\[1\]"),
        ({"order": Order("x", [object()])}, r"payload\.order\.\w+\[0\]"),  # type: ignore[arg-type]
        ({"a": {"b": {(1, 2): 3}}}, r"payload\.a\.b"),
        ({"s": {object()}}, r"payload\.s"),
        (object(), "payload"),
    ],
    ids=["list", "names", "dataclass", "key", "set", "itself"],
)
def test_the_message_names_the_part(payload: object, where: str) -> None:
    """Guards against a message about "a object" in a payload of a thousand lines."""
    with pytest.raises(OutboxError, match=rf"^{where} does not serialize to JSON: "):
        to_json("payload", payload)


def test_aliases_of_pydantic() -> None:
    """Guards against names that are neither pydantic's own choice nor the model's."""
    assert to_json("payload", Priced()) == '{"unit_price": 1}'
    assert to_json("payload", [Aliased()]) == '[{"unitPrice": 1}]'


@pytest.mark.parametrize("where", ["payload", "headers"])
@pytest.mark.parametrize(
    ("text", "why"), [("a\0", "NUL"), ("\\\0", "NUL"), ("\ud83d", "surrogate"), ("\ude00\ud83d", "surrogate")]
)
@pytest.mark.parametrize("in_name", [True, False])
def test_what_jsonb_does_not_store(
    connection: Connection, where: str, text: str, why: str, in_name: bool
) -> None:
    """Guards against an error of the database, which aborts the transaction, on unusual input years later."""
    content: dict[str, Any] = {"payload": {}, where: {text: 1} if in_name else {"x": [text]}}
    with pytest.raises(OutboxError, match=f"{where} has .*{why}"):
        emit(connection, "order", 1, "e", **content)
    assert one(connection, "SELECT count(*) FROM outbox") == (0,)


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "\\", "u0000", "\x01", "\x7f", "\ufffe", "😀"])
def test_what_only_looks_like_it(connection: Connection, text: str) -> None:
    """Guards against a backslash before 'u0000', taken for the character."""
    emit(connection, "order", 1, "e", {text: text})
    assert one(connection, "SELECT payload FROM outbox") == ({text: text},)


def test_sets_have_one_order() -> None:
    """Guards against two keys derived from one event: the order of a set's texts differs from process to
    process."""
    program = (
        "from outbox_pipelines.writer.json_text import to_json; print(to_json('it', set('abcdefghijkl')))"
    )
    for seed in ("1", "2", "3"):
        printed = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert json.loads(printed) == list("abcdefghijkl")
