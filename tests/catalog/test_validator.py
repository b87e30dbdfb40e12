"""The writer refuses what the event catalog does not allow, whichever way an event is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession

from outbox_pipelines.catalog import validator
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer import InvalidEventError, NewEvent, OutboxError, emit, emit_many, validate_with
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, RecordsEvents
from outbox_pipelines.writer.testing import captured
from tests.catalog.conftest import CATALOG, Write
from tests.schema.servers import Database


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    validate_with(None)


class Base(orm.DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "orders"
    __aggregate_type__ = "order"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


# The same, of which an earlier version is listed.
VERSIONED = CATALOG.replace(
    "topic: order-events", "version: 2\n    versions: {1: {type: object, required: [sum]}}"
)


@dataclass
class First:
    __event_type__ = "order.placed"
    __aggregate_type__ = "order"
    __aggregate_id__ = "sum"
    __event_version__ = 1
    sum: int


def one(payload: object, version: int | None = None) -> None:
    emit(None, "order", 1, "order.placed", payload, version=version)  # type: ignore[call-overload]


def many(payload: object, version: int | None = None) -> None:
    events = [
        NewEvent("order", 1, "order.placed", {"total": 1}),
        NewEvent("order", 1, "order.placed", payload, version=version),
    ]
    emit_many(None, events)  # type: ignore[call-overload]


def awaited(payload: object, version: int | None = None) -> None:
    async def write() -> None:
        await emit(AsyncSession(), "order", 1, "order.placed", payload, version=version)

    asyncio.run(write())


def added(payload: object, version: int | None = None) -> None:
    OutboxEvent("order", 1, "order.placed", payload, version=version)


def recorded(payload: object, version: int | None = None) -> None:
    Order(id=1).record("order.placed", payload, version=version)


@pytest.mark.parametrize("way", [one, many, awaited, added, recorded])
def test_every_way_to_write_is_checked(write: Write, way: Callable[..., None]) -> None:
    """Guards against a way past the event catalog, or past the schema of the event's own version."""
    validate_with(validator(write(VERSIONED)))
    with captured() as events:
        for payload, version in (({"total": 5}, None), ({"total": 5}, 2), ({"sum": 5}, 1)):
            way(payload, version)
        before = len(events)
        for payload, version, why in (
            ({"total": 0}, None, r"version 2: payload\.total: 0 is less than the minimum"),
            ({"total": 0}, 2, r"version 2: payload\.total: 0 is less than the minimum"),
            ({"total": 5}, 1, "version 1: payload: 'sum' is a required property"),
            ({"total": 5}, 7, "version 7 is not in the event catalog: add its schema to versions, or"),
        ):
            with pytest.raises(InvalidEventError, match=rf"order\.placed: {why}"):
                way(payload, version)
        assert len(events) == before
        validate_with(None)
        way({"total": 0}, 7)


def test_without_a_list_of_versions_any_has_the_schema(write: Write) -> None:
    """Guards against versions of aggregates that are taken for those of schemas."""
    validate_with(validator(write(CATALOG)))
    with captured() as events:
        one({"total": 5}, 7)
        with pytest.raises(InvalidEventError, match=r"order\.placed: payload\.total"):
            one({"total": 0}, 7)
    assert len(events) == 1


def test_many_says_which_one(write: Write) -> None:
    """Guards against a list of a thousand of which one is wrong, without a report of which one."""
    validate_with(validator(write(CATALOG)))
    with (
        captured(),
        pytest.raises(InvalidEventError, match=r"^event 1: order\.placed: payload: 'total' is a"),
    ):
        many({})


def test_the_payload_is_what_consumers_read(write: Write) -> None:
    """Guards against schemas that judge Python's values: a date would never be a string."""
    validate_with(validator(write(CATALOG)))
    with captured():
        one({"total": 5, "at": datetime.fromisoformat("2026-11-21T06:40:00+00:00"), "lines": ({"sku": "a"},)})
        with pytest.raises(InvalidEventError, match=r"payload\.at: .* is not a 'date-time'"):
            one({"total": 5, "at": datetime(2026, 11, 21)})
        with pytest.raises(InvalidEventError, match=r"payload\.lines\[0\]: 'sku' is a required property"):
            one({"total": 5, "lines": [{}]})
        with pytest.raises(InvalidEventError, match=r"payload\.total: '5' is not of type 'integer'"):
            one({"total": Decimal(5)})


def test_a_refusal_leaves_the_transaction_as_it_was(database: Database, write: Write) -> None:
    """Guards against an event that is sent before it is checked, and a class of another version."""
    validate_with(validator(write(VERSIONED)))
    with database.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {"total": 5})
        emit(connection, First(1))
        with pytest.raises(InvalidEventError):
            emit(connection, "order", 1, "order.placed", {})
        with pytest.raises(InvalidEventError, match="version 2: payload: 'total' is a required property"):
            emit(connection, First(1), version=2)
        emit(connection, "order", 1, "order.shipped", ["anything"])
    assert database.rows("SELECT event_type, version FROM outbox ORDER BY seq") == [
        ("order.placed", None),
        ("order.placed", 1),
        ("order.shipped", None),
    ]


def test_unknown_and_retired_types(write: Write) -> None:
    """Guards against a misspelt type that passes, and a writer that outlives its type."""
    path = write(CATALOG.replace("owner: ada@example.com", "owner: ada@example.com\n    lifecycle: retired"))
    refuses, passes = validator(path), validator(str(path), unknown="pass")
    with pytest.raises(ValueError, match="event type is not in the event catalog"):
        refuses("order.plcaed", {}, None)
    passes("order.plcaed", {}, 7)
    for check in (refuses, passes):
        with pytest.raises(ValueError, match="is retired"):
            check("order.shipped", {}, None)


def test_a_long_payload_is_not_repeated(write: Write) -> None:
    """Guards against a megabyte in the log for each refusal."""
    with pytest.raises(ValueError, match="is not of type 'integer'") as refused:
        validator(write(CATALOG))("order.placed", {"total": "x" * 100_000}, None)
    assert len(str(refused.value)) < 300


def test_whatever_a_check_raises_is_a_refusal() -> None:
    """Guards against an error of one's own check that the application takes for the database's."""

    def broken(event_type: str, payload: object, version: int | None) -> None:
        raise KeyError(event_type)

    validate_with(broken)
    with captured() as events, pytest.raises(OutboxError, match=r"order\.placed"):
        one({})
    assert events == []


def test_a_wrong_event_catalog_stops_the_start(tmp_path: Path) -> None:
    """Guards against an application that runs without the checks that it asked for."""
    with pytest.raises(SetupError, match=r"^.*none\.yaml: cannot be read"):
        validator(tmp_path / "none.yaml")
