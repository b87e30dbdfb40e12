"""Events whose class names their type and key, written and read."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import attrs
import pydantic
import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.consumer.testing import handle, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer import NewEvent, OutboxError, emit, emit_many
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, RecordsEvents
from outbox_pipelines.writer.testing import captured

KAFKA = {"bootstrap.servers": "broker:9092"}
write: Any = emit
write_many: Any = emit_many


@dataclass(frozen=True)
class Placed:
    __event_type__ = "order.placed"
    __aggregate_type__ = "order"
    __aggregate_id__ = "order_id"
    __event_version__ = 2
    order_id: int
    total: Decimal


class Paid(pydantic.BaseModel):
    __event_type__: ClassVar[str] = "order.paid"
    __aggregate_type__: ClassVar[str] = "order"
    __aggregate_id__: ClassVar[str] = "order_id"
    order_id: int
    total: Decimal


@attrs.define(slots=True)
class Sent:
    __event_type__ = "order.sent"
    __aggregate_type__ = "order"
    __aggregate_id__ = "key"
    number: int

    @property
    def key(self) -> str:
        return f"o-{self.number}"


class Base(orm.DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "typed_orders"
    __aggregate_type__ = "order"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


PLACED = Placed(42, Decimal("5.10"))
PAID = Paid(order_id=42, total=Decimal("5.10"))
EXPECTED = [
    ("order", "42", "order.placed", {"order_id": 42, "total": "5.10"}, 2),
    ("order", "42", "order.paid", {"order_id": 42, "total": "5.10"}, None),
    ("order", "o-7", "order.sent", {"number": 7}, None),
]


def found(events: list[Any]) -> list[tuple[Any, ...]]:
    return [(e.aggregate_type, e.aggregate_id, e.event_type, e.payload, e.version) for e in events]


def test_each_kind_of_class() -> None:
    """Guards against a form that only dataclasses have."""
    with captured() as events:
        for event in (PLACED, PAID, Sent(7)):
            write(None, event, idempotency_key="k" if event is PAID else None)
        write_many(None, [PLACED, NewEvent("order", 1, "order.paid", {}), PAID])
        write(None, PLACED, version=3)
    assert found(events[:3]) == EXPECTED
    assert [event.idempotency_key for event in events[:3]] == [None, "k", None]
    assert [event.event_type for event in events[3:6]] == ["order.placed", "order.paid", "order.paid"]
    assert events[6].version == 3


def test_in_a_session() -> None:
    """Guards against a form that objects of SQLAlchemy do not have."""
    engine = sqlalchemy.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with captured() as events, orm.Session(engine) as session:
        order = Order(id=42)
        order.record(PLACED)
        session.add(order)
        session.add(OutboxEvent(PAID, idempotency_key="k"))
        session.flush()
    assert sorted(found(events), reverse=True, key=str) == EXPECTED[:2]
    with pytest.raises(OutboxError, match="an event of order: __aggregate_type__ of the row is 'cart'"):
        type("Cart", (RecordsEvents,), {"__aggregate_type__": "cart"})().record(PLACED)


@dataclass
class Nameless:
    __event_type__ = "order.placed"
    __aggregate_id__ = "order_id"


@dataclass
class Keyless:
    __event_type__ = "order.placed"
    __aggregate_type__ = "order"
    __aggregate_id__ = "order_id"


@dataclass
class Annotated:
    order_id: int
    __event_type__: str = "order.placed"
    __aggregate_type__: str = "order"
    __aggregate_id__: str = "order_id"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Annotated(42), "__aggregate_id__ of Annotated is a field of the dataclass.*ClassVar"),
        (Placed, "Placed is a class: pass an object of it"),
        ([PLACED], "given a list as its event: pass a list of events to emit_many"),
        (NewEvent("order", 1, "e", {}), "given a NewEvent as its event"),
        (Nameless(), "Nameless is no event: its class has no __aggregate_type__"),
        (Keyless(), "Keyless has no attribute 'order_id'"),
        (object(), "object is no event: its class has no __event_type__"),
        ("order", "an argument is missing"),
        (None, "NoneType is no event"),
        (Placed(None, Decimal(5)), "aggregate_id is None"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_typed_event(event: object, message: str) -> None:
    """Guards against an AttributeError, or a TypeError of Python, from within the library."""
    with captured() as events, pytest.raises(OutboxError, match=message):
        write(None, event)
    assert events == []


def test_one_event_for_emit_many() -> None:
    """Guards against `object is not iterable`, an error of Python, in the wrong place."""
    for given, kind in (
        (PLACED, "one Placed"),
        (NewEvent("order", 42, "order.placed", {}), "one NewEvent"),
        (None, "a N"),
    ):
        with captured(), pytest.raises(OutboxError, match=f"given {kind}.*: give a list of events"):
            write_many(None, given)


def test_arguments_beside_it() -> None:
    """Guards against a payload, or a second id, that is ignored."""
    for arguments, message in (
        ((PLACED, 42), "aggregate_id is superfluous: Placed names it"),
        (("order", 42, "order.placed"), "an argument is missing"),
        ((PLACED, 42, "order.placed"), "an argument is missing"),
    ):
        with captured(), pytest.raises(OutboxError, match=message):
            write(None, *arguments)


class Seen(pydantic.BaseModel):
    __event_type__: ClassVar[str] = "order.seen"
    __aggregate_type__: ClassVar[str] = "order"


def test_a_class_without_an_id() -> None:
    """Guards against an id that must be in each payload."""
    order = Order(id=42)
    with captured() as events:
        write(None, Seen(), aggregate_id=42)
        order.record(Seen())
        OutboxEvent(Seen(), 42)
        with pytest.raises(OutboxError, match=r"its class has no __aggregate_id__, a text: pass"):
            write(None, Seen())
    assert found(events) == [("order", "42", "order.seen", {}, None)]


def test_another_class_at_the_handler() -> None:
    """Guards against a handler that reads each event as one of another type."""
    consumer = Consumer(source="billing", topics=["order-events"], kafka=KAFKA, dsn="postgresql://")

    def placed(event: Event[Paid], connection: object) -> None: ...

    message = (
        "placed handles order.placed and its annotation names Paid, a class of order.paid: annotate Placed"
    )
    with pytest.raises(SetupError, match=message):
        consumer.on(Placed)(placed)
    consumer.on(Paid)(placed)


@dataclass
class First:
    __event_type__ = "order.placed"
    __event_version__ = 1
    total: int


def test_classes_of_versions_at_the_handler() -> None:
    """Guards against an event that is read as one of another version, and an annotation that is ignored."""
    consumer = Consumer(source="billing", topics=["order-events"], kafka=KAFKA, dsn="postgresql://")
    seen: list[Any] = []

    def one(order: Placed, connection: object) -> None: ...
    def plain(order: dict[str, Any], connection: object) -> None: ...
    def batch(orders: list[Event[First | Placed]], connection: object) -> None: ...
    def both(order: First | Placed | None, connection: object) -> None:
        seen.append(order)

    with pytest.raises(SetupError, match=r"^one: it handles several versions: annotate First \| Placed$"):
        consumer.on(First, Placed)(one)
    with pytest.raises(SetupError, match=r"First \| Other need an __event_version__ each"):
        consumer.on(First, type("Other", (First,), {}))(plain_event)
    consumer.on(First, Placed)(both)
    for payload, version in (
        ({"total": 5}, 1),
        ({"total": "5", "order_id": 7}, 2),
        ({"total": 6}, None),
        (None, 2),
    ):
        handle(consumer, make_event("order.placed", payload, version=version), using=None)
    assert seen == [First(5), Placed(7, Decimal(5)), First(6), None]
    options: Any
    for handler, options in ((plain, {}), (batch, {"batch": 10})):
        other = Consumer(source="billing", topics=["order-events"], kafka=KAFKA, dsn="postgresql://")
        other.on(First, Placed, **options)(handler)
    # Of two types, a payload is JSON.
    other.on(Paid, Seen)(plain_event)


def plain_event(event: Event, connection: object) -> None: ...


def test_the_same_class_at_the_consumer() -> None:
    """Guards against a type that is written twice, by the producer and the consumer, in two spellings."""
    consumer = Consumer(source="billing", topics=["order-events"], kafka=KAFKA, dsn="postgresql://")
    seen: list[Any] = []

    @consumer.on(Placed)
    def placed(event: Event, connection: object) -> None:
        seen.append(event.payload)

    @consumer.on(Paid, "order.refunded")
    def paid(order: Paid, connection: object) -> None:
        seen.append(order)

    assert consumer.types == ["order.placed", "order.paid", "order.refunded"]
    with captured() as events:
        write_many(None, [PLACED, PAID])
    for event in events:
        handle(consumer, make_event(event.event_type, event.payload), using=None)
    assert seen == [PLACED, PAID]


def test_classes_that_the_consumer_refuses() -> None:
    """Guards against a handler of the type "<class …>", which never has an event."""
    consumer = Consumer(source="billing", topics=["order-events"], kafka=KAFKA, dsn="postgresql://")
    for wrong in ((int,), ("a", object()), (), (lambda event, connection: None,)):
        register: Any = consumer.on
        with pytest.raises(SetupError, match="a class that has __event_type__"):
            register(*wrong)
    consumer.on(Placed)(lambda event, connection: None)
    again = consumer.on(Placed)
    with pytest.raises(SetupError, match=r"order\.placed has a handler already"):
        again(lambda event, connection: None)
