"""`assert_emitted`: what it accepts as the event, and what it reports about others."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest import mock

import pytest

from outbox_pipelines.writer import emit
from outbox_pipelines.writer.testing import (
    WrittenEvent,
    assert_emitted,
    assert_nothing_emitted,
    captured,
)

NOBODY: Any = None


@dataclass
class Address:
    city: str
    zip: str


@pytest.fixture
def events() -> Iterator[list[WrittenEvent]]:
    with captured() as events:
        body = {
            "total": Decimal("5.00"),
            "items": [{"sku": "a", "n": 1}],
            "to": Address("Oslo", "0150"),
            "paid": True,
            "note": None,
            "at": datetime(2026, 1, 2, tzinfo=UTC),
        }
        emit(
            NOBODY, "order", 42, "order.placed", body, headers={"tenant": "t"}, correlation_id="r", version=2
        )
        emit(NOBODY, "order", 42, "order.shipped", {"parcel": 7})
        emit(NOBODY, "order", 43, "order.shipped", {"parcel": 8})
        yield events


@pytest.mark.parametrize(
    "expected",
    [
        {},
        {"aggregate_type": "order", "aggregate_id": 42},
        {"aggregate_id": "42"},
        {"payload": {}},
        {"payload": {"total": Decimal("5.00")}},
        {"payload": {"total": "5.00"}},
        {"payload": {"total": ..., "note": None}},
        {"payload": {"to": {"city": "Oslo"}}},
        {"payload": {"to": Address("Oslo", "0150")}},
        {"payload": {"items": [{"sku": "a", "n": 1}]}},
        {"payload": {"at": datetime(2026, 1, 2, tzinfo=UTC)}},
        {"payload": {"items": mock.ANY, "paid": mock.ANY}},
        {"headers": {"tenant": "t"}, "correlation_id": "r", "version": 2},
        {"idempotency_key": None, "causation_id": None, "traceparent": None},
    ],
)
def test_what_matches(events: list[WrittenEvent], expected: dict[str, Any]) -> None:
    """Guards against expectations that must be written as JSON, or in full."""
    assert assert_emitted(events, "order.placed", **expected) is events[0]


@pytest.mark.parametrize(
    ("expected", "difference"),
    [
        ({"aggregate_id": 43}, "aggregate_id is '42', not '43'"),
        ({"aggregate_type": "Order"}, "aggregate_type is 'order', not 'Order'"),
        ({"payload": {"total": 5}}, "payload.total is '5.00', not 5"),
        ({"payload": {"total": Decimal("5.0")}}, "payload.total is '5.00', not '5.0'"),
        ({"payload": {"sum": 5}}, "payload.sum is missing"),
        ({"payload": {"sum": ...}}, "payload.sum is missing"),
        ({"payload": {"paid": 1}}, "payload.paid is True, not 1"),
        ({"payload": {"note": False}}, "payload.note is None, not False"),
        ({"payload": {"to": {"city": "Rome"}}}, "payload.to.city is 'Oslo', not 'Rome'"),
        ({"payload": {"to": Address("Oslo", "1")}}, "payload.to.zip is '0150', not '1'"),
        ({"payload": {"items": []}}, "payload.items is [{'sku': 'a', 'n': 1}], not []"),
        ({"payload": {"to": "Oslo"}}, "payload.to is {'city': 'Oslo', 'zip': '0150'}, not 'Oslo'"),
        ({"headers": {"tenant": "u"}}, "headers.tenant is 't', not 'u'"),
        ({"headers": None}, "headers is {'tenant': 't'}, not None"),
        ({"correlation_id": uuid.UUID(int=1)}, f"correlation_id is 'r', not '{uuid.UUID(int=1)}'"),
        ({"version": None}, "version is 2, not None"),
        ({"idempotency_key": "k"}, "idempotency_key is None, not 'k'"),
    ],
)  # fmt: skip
def test_what_does_not(events: list[WrittenEvent], expected: dict[str, Any], difference: str) -> None:
    """Guards against an expectation that is ignored, and a message that does not explain the failure."""
    with pytest.raises(AssertionError) as raised:
        assert_emitted(events, "order.placed", **expected)
    assert [line for line in str(raised.value).splitlines() if line.startswith("    ")] == [
        f"    {difference}"
    ]


def test_the_message(events: list[WrittenEvent]) -> None:
    """Guards against a message that does not say what was expected, or what there was."""
    with pytest.raises(AssertionError) as raised:
        assert_emitted(events, "order.shipped", aggregate_id=42, payload={"parcel": 9})
    assert str(raised.value).splitlines()[:1] + str(raised.value).splitlines()[2:] == [
        "no event has aggregate_id='42', event_type='order.shipped', payload={'parcel': 9}; emitted:",
        "  order.shipped of order 42: {'parcel': 7}",
        "    payload.parcel is 7, not 9",
        "  order.shipped of order 43: {'parcel': 8}",
        "    aggregate_id is '43', not '42'",
        "    payload.parcel is 8, not 9",
    ]
    assert str(raised.value).splitlines()[1].startswith("  order.placed of order 42: {")


def test_two_are_too_many(events: list[WrittenEvent]) -> None:
    """Guards against an event that is emitted twice, in a test that asks whether it was emitted."""
    with pytest.raises(AssertionError) as raised:
        assert_emitted(events, "order.shipped")
    assert str(raised.value).splitlines() == [
        "2 events instead of one have event_type='order.shipped':",
        "  order.shipped of order 42: {'parcel': 7}",
        "  order.shipped of order 43: {'parcel': 8}",
    ]


def test_nothing_at_all() -> None:
    """Guards against an empty list of events below 'emitted:'."""
    with pytest.raises(AssertionError, match=r"emitted:\n  nothing$"):
        assert_emitted([], "order.placed")


def test_nothing_emitted(events: list[WrittenEvent]) -> None:
    """Guards against an assertion that holds for anything."""
    assert_nothing_emitted([])
    with pytest.raises(AssertionError, match=r"should be emitted; emitted:\n  order.placed of order 42"):
        assert_nothing_emitted(events)


def test_long_lists_are_cut() -> None:
    """Guards against a message of megabytes."""
    with captured() as events:
        for n in range(25):
            emit(NOBODY, "order", n, "e", "x" * 10_000)
    with pytest.raises(AssertionError) as raised:
        assert_nothing_emitted(events)
    assert len(str(raised.value)) < 10_000
    assert str(raised.value).endswith("\n  and 5 more")
