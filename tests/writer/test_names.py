"""Ids and names that are not what they seem to be."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import uuid
from typing import Any

import attrs
import numpy as np
import pandas as pd
import pydantic
import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.writer import NewEvent, OutboxError, derive_key, emit, emit_many
from outbox_pipelines.writer.testing import captured

write: Any = emit


class Plain:
    id = 42


@dataclasses.dataclass
class Data:
    id: int = 42


@attrs.define
class Attrs:
    id: int = 42


class Model(pydantic.BaseModel):
    id: int = 42


class Base(orm.DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "named_rows"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)

    def __str__(self) -> str:
        return "Row of Ada"


class DjangoRow:
    _meta = "of a model of Django"

    def __str__(self) -> str:
        return "Order object (42)"


@dataclasses.dataclass(frozen=True)
class OrderId:
    value: int

    def __str__(self) -> str:
        return f"o-{self.value}"


class Number(enum.IntEnum):
    ONE = 1


WRONG: list[Any] = [
    *(Plain(), Data(), Attrs(), Model(), Row(id=42), DjangoRow(), object(), Plain, pytest, len, lambda: 42),
    *(Row.id, sqlalchemy.null(), sqlalchemy.func.now(), sqlalchemy.literal(5), ValueError("42"), 10**5000),
    *(True, np.True_, 42.0, np.float32(42), float("nan"), pd.NaT, pd.NA, decimal.Decimal("NaN")),
    *(
        (1, 2),
        [1],
        {"id": 1},
        {1},
        b"42",
        bytearray(b"42"),
        memoryview(b"42"),
        np.array([42]),
        pd.Series([42]),
    ),
]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_what_is_no_id(value: object) -> None:
    """Guards against the key `<Plain object at 0x…>`, another one in each process; 42.0; NaT."""
    with captured() as events:
        for call in (
            lambda: write(None, "order", value, "order.placed", {}),
            lambda: emit_many(None, [NewEvent("order", value, "order.placed", {})]),  # type: ignore[call-overload]
            lambda: derive_key(value, "order.placed", {}),
        ):
            with pytest.raises(OutboxError, match=r"aggregate_id is .*: give ") as refused:
                call()
            assert "0x" not in str(refused.value)
    assert events == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(42), "42"),
        (Number.ONE, "1"),
        (OrderId(7), "o-7"),
        (decimal.Decimal("42"), "42"),
        (datetime.date(2026, 11, 21), "2026-11-21"),
        (ipaddress.ip_address("::1"), "::1"),
        (np.str_("a"), "a"),
        (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    ],
)
def test_types_with_a_text(value: object, text: str) -> None:
    """Guards against a refusal of ids that are values with a text of their own."""
    with captured() as events:
        write(None, "order", value, "order.placed", {})
    assert [event.aggregate_id for event in events] == [text]


@pytest.mark.parametrize(
    "names",
    [
        ("order.placed", "42", "order"),
        ("order", "order.placed", "42"),
        ("42", "order", "order.placed"),
        ("order.placed", "order", "42"),
        ("OrderPlaced", str(uuid.UUID(int=7)), "Order"),
        ("order", "order_placed", str(uuid.UUID(int=7))),
    ],
)
def test_arguments_that_changed_places(names: tuple[str, str, str]) -> None:
    """Guards against a topic `order.placed-events`, or a key that is a type: found in production."""
    with (
        captured() as events,
        pytest.raises(OutboxError, match=r"exchanged, the arguments are aggregate_type"),
    ):
        write(None, *names, {})
    assert events == []


@pytest.mark.parametrize("names", [(42, "order", "e"), ("order", "e", 42), ("order", 42, {"total": 5})])
def test_types_that_show_it(names: tuple[Any, ...]) -> None:
    """Guards against a message that names a type and not the mistake."""
    says = "the arguments are aggregate_type, aggregate_id, event_type, payload"
    with captured(), pytest.raises(OutboxError, match=says):
        write(None, *names, {})


@pytest.mark.parametrize(
    "names",
    [
        ("order", "42", "order.placed"),
        ("order", "order.17", "1"),
        ("order", "order.17", "placed"),
        ("1", "2", "3"),
        ("order", "1", "7"),
        ("order", "1", "order"),
        ("order.line", "1", "order.placed"),
        ("Order", "42", "OrderPlaced"),
        ("a", "b", "c"),
    ],
)
def test_names_that_are_right(names: tuple[str, str, str]) -> None:
    """Guards against an event that is refused for its unusual names."""
    with captured() as events:
        write(None, *names, {})
    assert len(events) == 1


@pytest.mark.parametrize("value", [pd.NaT, pd.NA, decimal.Decimal("NaN"), decimal.Decimal("sNaN")], ids=repr)
def test_missing_values_in_a_payload(value: object) -> None:
    """Guards against the text `NaT` where a time belongs."""
    with captured(), pytest.raises(OutboxError, match=r"payload\.at\[0\] .*omit it, or send null"):
        write(None, "order", 42, "order.placed", {"at": [value]})
