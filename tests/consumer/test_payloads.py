"""Payloads as what a handler's annotation asks for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import psycopg
import pydantic
import pytest

from outbox_pipelines.consumer import Consumer, Counts, Event, RefusedError
from outbox_pipelines.consumer.testing import handle, make_event
from outbox_pipelines.errors import SetupError
from tests.conftest import clean_environment, either, wait_until
from tests.consumer.place import Place, at_work, effect, running, uuid7

if TYPE_CHECKING:
    from collections import OrderedDict

Connection = psycopg.Connection[Any]


class Currency(Enum):
    EUR = "EUR"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    parts: list[Line] = field(default_factory=list)


@dataclass
class Placed:
    total: int
    at: datetime
    customer: UUID | None = None
    day: date | None = None
    currency: Currency = Currency.EUR
    lines: tuple[Line, ...] = ()
    tags: dict[str, float] = field(default_factory=dict)
    kind: Literal["web", "shop"] = "web"
    other: Any = None

    def __post_init__(self) -> None:
        if self.total < 0:
            raise ValueError("a negative total")


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    total: int
    at: datetime
    lines: list[Line] = []


@pydantic.dataclasses.dataclass
class Counted:
    n: int


WHOLE: dict[str, Any] = {
    "total": 5,
    "at": "2026-11-22T10:00:00Z",
    "customer": "00000000-0000-0000-0000-000000000001",
    "day": "2026-11-22",
    "currency": "EUR",
    "lines": [{"sku": "a", "price": 0.1, "parts": [{"sku": "b", "price": "2"}]}],
    "tags": {"x": 1},
    "kind": "shop",
    "other": [1],
    "added_later": True,
}
LEAST = {"total": 5, "at": "2026-11-22T10:00:00Z"}
AT = datetime(2026, 11, 22, 10, tzinfo=UTC)


def bare() -> Consumer:
    return Consumer(source="s", topics=["t"], kafka={"bootstrap.servers": "broker:9092"}, dsn="")


def given(handler: Any, *payloads: object, batch: int | None = None) -> None:
    consumer = bare()
    consumer.on("e", batch=batch)(handler)
    events = [make_event("e", each) for each in payloads]
    assert handle(consumer, *events, using=None) == ["handled"] * len(payloads)


seen: list[Any] = []


def of_event(event: Event, connection: Any) -> None:
    seen.append(event.payload)


def of_nothing(event, connection) -> None:  # type: ignore[no-untyped-def]
    seen.append(event.payload)


def of_dict(payload: dict[str, Any], connection: Any) -> None:
    seen.append(payload)


def of_dataclass(payload: Placed, connection: Any) -> None:
    seen.append(payload)


def of_typed_event(event: Event[Placed], connection: Any) -> None:
    assert event.type == "e"
    seen.append(event.payload)


def of_model(payload: Model, connection: Any) -> None:
    seen.append(payload)


def of_pydantic_dataclass(payload: Counted, connection: Any) -> None:
    seen.append(payload)


def of_optional(payload: Placed | None, connection: Any) -> None:
    seen.append(payload)


def of_list(payloads: list[Placed], connection: Any) -> None:
    seen.extend(payloads)


def of_typed_events(events: list[Event[Model]], connection: Any) -> None:
    seen.extend(event.payload for event in events)


def of_unresolved(event: OrderedDict, connection: Any) -> None:  # type: ignore[type-arg]
    """A class that is there for the type checker alone."""


def of_int_key(payload: dict[str, set[bytes]], connection: Any) -> None:
    """bytes are no JSON."""


class Method:
    def handle(self, payload: Placed, connection: Any) -> None:
        seen.append(payload)


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


def test_each_kind_of_annotation() -> None:
    """Guards against an annotation that is passed over, so that the handler fails at each event."""
    for plain in (of_event, of_nothing, of_dict):
        given(plain, WHOLE)
    assert seen == [WHOLE] * 3
    seen.clear()
    for typed in (of_dataclass, of_typed_event, of_optional, Method().handle):
        given(typed, WHOLE)
    inner = Line("b", Decimal(2))
    whole = Placed(5, AT, UUID(int=1), date(2026, 11, 22), tags={"x": 1.0}, kind="shop", other=[1])
    whole.lines = (Line("a", Decimal("0.1"), [inner]),)
    assert seen == [whole] * 4
    seen.clear()
    given(of_list, LEAST, LEAST, batch=10)
    assert seen == [Placed(5, AT)] * 2
    seen.clear()
    given(of_model, LEAST)
    given(of_typed_events, LEAST, batch=2)
    given(of_pydantic_dataclass, {"n": 7})
    assert seen == [Model(total=5, at=AT), Model(total=5, at=AT), Counted(7)]
    seen.clear()
    given(of_optional, None)
    assert seen == [None]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"at": LEAST["at"]}, "total is missing"),
        (LEAST | {"total": "5"}, "total is not an integer"),
        (LEAST | {"total": True}, "total is not an integer"),
        (LEAST | {"total": -1}, "the payload is rejected: a negative total"),
        (LEAST | {"at": "soon"}, "at is not a time in ISO 8601"),
        (LEAST | {"customer": 5}, "customer is not a UUID or null"),
        (LEAST | {"currency": "USD"}, "currency is not a value of Currency"),
        (LEAST | {"lines": [{"sku": "a", "price": 1}, {"sku": "b"}]}, r"lines\[1\].price is missing"),
        (LEAST | {"lines": [{"sku": "a", "price": "x"}]}, r"lines\[0\].price is not a decimal number"),
        (LEAST | {"lines": {}}, "lines is not a list"),
        (LEAST | {"tags": {"x": "1"}}, "tags.x is not a number"),
        (LEAST | {"kind": "fax"}, "kind is none of 'web', 'shop'"),
        ([], "the payload is not an object"),
        (None, "the payload is not an object"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_member(payload: object, reason: str) -> None:
    consumer = bare()
    consumer.on("e")(of_dataclass)
    with pytest.raises(RefusedError, match=f"its payload is not a valid Placed: {reason}$"):
        handle(consumer, make_event("e", payload), using=None)
    assert seen == []


def test_pydantic_names_the_members_and_not_the_values() -> None:
    consumer = bare()
    consumer.on("e")(of_model)
    payload = {"total": "secret", "at": LEAST["at"], "lines": [{"sku": "secret"}]}
    with pytest.raises(RefusedError) as refused:
        handle(consumer, make_event("e", payload), using=None)
    text = str(refused.value)
    assert (
        "its payload is not a valid Model: total is rejected: Input should be a valid integer; "
        "lines[0].price: Field" in text
    )
    assert "secret" not in text


@pytest.mark.parametrize("value", [b"{", b"\xff", b"[" * 100_000])
def test_a_value_that_is_no_json_is_refused(value: bytes) -> None:
    consumer = bare()
    consumer.on("e")(of_dataclass)
    with pytest.raises(RefusedError, match=r"its value is (not JSON|nested too deeply)"):
        handle(consumer, make_event("e", value=value), using=None)


@pytest.mark.parametrize(
    ("handler", "batch", "says"),
    [
        (of_list, None, "of_list takes a list: register it with batch="),
        (of_dataclass, 10, "of_dataclass has batch=10 and is called with a list"),
        (of_unresolved, None, "'OrderedDict' of of_unresolved cannot be resolved"),
        (of_int_key, None, "of_int_key: a payload cannot be read as bytes"),
    ],
)
def test_what_cannot_be_given_is_refused_at_once(handler: Any, batch: int | None, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        bare().on("e", batch=batch)(handler)


def test_an_event_that_was_imported_for_the_type_checker_alone() -> None:
    """Guards against a refusal of what every linter moves there."""
    space: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n"
        "def one(event: Event, c): ...\n"
        "def many(events: list[Event], c): ...",
        space,
    )
    bare().on("e")(space["one"])
    bare().on("e", batch=5)(space["many"])


def test_pydantic_is_not_imported() -> None:
    script = (
        "import sys, dataclasses\nfrom outbox_pipelines.consumer import Consumer\n"
        "c = Consumer(source='s', topics=['t'], kafka={'bootstrap.servers': 'b:1'}, dsn='')\n"
        "@dataclasses.dataclass\nclass Placed:\n    n: int\n"
        "@c.on('e')\ndef handle(placed: Placed, connection): ...\nassert 'pydantic' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@dataclass
class Numbered:
    n: int


@pytest.mark.parametrize("how", either("run", "batch", "receive"))
def test_what_does_not_fit_is_a_dead_letter_at_once(place: Place, how: str) -> None:
    """Guards against attempts that cannot succeed, and others of a batch that are taken back with it."""
    place.load(30)
    [wrong] = place.send(uuid7())
    place.rows("ALTER TABLE effects ADD UNIQUE (event_id)")
    place.put('{"n": "x"}', key="7", id=(wrong := str(uuid7())), event_type="order.placed")
    calls: list[int] = []

    def one(event: Event[Numbered], connection: Connection) -> None:
        calls.append(1)
        effect(event._with_payload({"n": event.payload.n}), connection)

    def many(events: list[Event[Numbered]], connection: Connection) -> None:
        calls.append(len(events))
        for event in events:
            effect(event._with_payload({"n": event.payload.n}), connection)

    consumer = place.bare()
    consumer.on("order.placed", batch=20 if how == "batch" else None)(many if how == "batch" else one)
    if how == "receive":
        with at_work(consumer, "receive") as part:
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            assert part.end() == Counts(received=31, failures=1, dead_letters=1)
        consumer.drain(until_empty=True)
    else:
        with running(consumer) as run:
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            assert run.end() == Counts(handled=31, failures=1, dead_letters=1)
    # No event was tried for itself because of another one.
    assert sum(calls) == place.effects() == 31
    [(message_id, event_type, error)] = place.rows(
        "SELECT message_id::text, event_type, last_error FROM inbox WHERE state = 'failed'"
    )
    # By its own id, so that a repetition is a duplicate, also when it was replayed.
    assert (message_id, event_type) == (wrong, "order.placed")
    assert error.endswith("its payload is not a valid Numbered: n is not an integer")
