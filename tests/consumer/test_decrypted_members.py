"""Handlers get encrypted members decrypted, and `ERASED` for what was erased."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
import pydantic
import pytest

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.consumer import AsyncConsumer, Consumer, Event
from outbox_pipelines.consumer.testing import handle, handle_async, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.subject_keys import ERASED, SubjectKeys
from outbox_pipelines.writer.references import Body
from tests.conftest import wait_until
from tests.consumer.place import Place, running, uuid7
from tests.history.proxy import Proxy
from tests.subject_keys.conftest import MASTER, OTHER, forget, keys, keys_dsn, settings

__all__ = ["forget", "keys", "keys_dsn", "settings"]
KAFKA = {"bootstrap.servers": "broker:9092"}
ARGUMENTS: dict[str, Any] = {"source": "s", "topics": ["t"], "kafka": KAFKA, "dsn": "host=none.invalid"}
PERSON = {"name": "Ann", "born": "1980-02-03", "items": [{"to": "Oslo"}]}
PATHS = ("name", "born", "items[].to")


@dataclass
class Item:
    to: str


@dataclass
class Person:
    name: str
    born: date
    items: list[Item]


class Model(pydantic.BaseModel):
    name: str
    born: date | None
    items: list[dict[str, str]]


def a_consumer(seen: list[Any], keys: Any, kind: Any = Event, **more: Any) -> Consumer:
    consumer = Consumer(**ARGUMENTS, keys=keys, **more)

    def placed(given: Any, connection: object) -> None:
        seen.append(given)

    placed.__annotations__["given"] = kind
    consumer.on("order.placed")(placed)
    return consumer


@pytest.mark.slow
def test_what_a_handler_sees(
    keys: SubjectKeys, keys_dsn: str, forget: Callable[[object], Any], tmp_path: Path
) -> None:
    """Guards against a shape, a body or a class with which a handler gets encrypted text, or an exception."""
    protected = keys.protect(PERSON, dict.fromkeys(PATHS, 7))
    bodies = Bodies(str(tmp_path))
    [body] = bodies.put(
        "2026-03-01", [Body("null", bodies, json.dumps(protected).encode(), "application/json")]
    )
    event = make_event("order.placed", protected)
    cloudevent = {
        **{"specversion": "1.0", "type": "order.placed", "source": "/", "id": event.id, "data": protected}
    }
    events = [
        event,
        make_event("order.placed", id=event.id, value=json.dumps(cloudevent).encode()),
        make_event("order.placed", json.loads(body)),
    ]
    for each in events:
        seen: list[Any] = []
        for kind in (Event, dict, Person, Event[Model]):
            assert handle(a_consumer(seen, keys, kind, bodies=bodies), each, using=None) == ["handled"]
        assert seen[0].payload == seen[1] == PERSON
        assert seen[2] == Person("Ann", date(1980, 2, 3), [Item("Oslo")])
        assert seen[3].payload.born == date(1980, 2, 3)
    forget(7)
    fresh = SubjectKeys(keys_dsn, master_key=MASTER)
    seen = []
    for kind in (dict, Person, Event[Model]):
        assert handle(a_consumer(seen, fresh, kind), event, using=None) == ["handled"]
    assert seen[0] == {"name": ERASED, "born": ERASED, "items": [{"to": ERASED}]}
    assert seen[1] == Person(ERASED, ERASED, [Item(ERASED)])  # type: ignore[arg-type]
    assert seen[1].born is ERASED
    assert not seen[1].name
    assert (seen[2].payload.name, seen[2].payload.born) == ("outbox-erased", None)
    assert event.payload == protected


@pytest.mark.slow
def test_a_batch_asks_once(keys: SubjectKeys, keys_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a query for each event of a batch, and a blocked event loop."""
    events = [make_event("order.placed", keys.protect({"a": n}, {"a": n})) for n in range(5)]
    fresh = SubjectKeys(keys_dsn, master_key=MASTER)
    asked: list[Any] = []
    read = fresh._store.read

    def counted(ids: Sequence[str]) -> Any:
        asked.append(len(ids))
        return read(ids)

    monkeypatch.setattr(fresh._store, "read", counted)
    consumer = AsyncConsumer(**ARGUMENTS, keys=fresh)
    seen: list[Any] = []

    @consumer.on("order.placed", batch=10)
    async def placed(given: list[Event], connection: object) -> None:
        seen.extend(each.payload["a"] for each in given)

    assert asyncio.run(handle_async(consumer, *events, using=None)) == ["handled"] * 5
    assert (seen, asked) == ([0, 1, 2, 3, 4], [5])


@pytest.mark.slow
def test_what_cannot_be_decrypted(keys: SubjectKeys, keys_dsn: str) -> None:
    """Guards against an outage that makes dead letters, and a wrong text that is handled as an erased one."""
    protected = keys.protect({"a": "x"}, {"a": 7})
    unknown = {
        "a": protected["a"].replace(protected["a"].split(":")[2], "0" * 8 + "-0000" * 3 + "-" + "0" * 12)
    }
    away = SubjectKeys("host=127.0.0.1 port=1", master_key=MASTER)
    damaged = keys.protect({"a": "x"}, {"a": 8})
    both = SubjectKeys(keys_dsn, master_key=[MASTER, OTHER])
    with psycopg.connect(keys_dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE subject_keys SET wrapped = decode(repeat('00', 60), 'hex') WHERE subject = '8'"
        )
        fresh = SubjectKeys(keys_dsn, master_key=MASTER)
        assert handle(a_consumer([], fresh), make_event("order.placed", protected), using=None) == ["handled"]
        # A rotation that this process does not know of.
        both._store.make_current(both._masters.ids[1])
        theirs = both.protect({"a": "x"}, {"a": 9})
        assert handle(
            a_consumer([], fresh), make_event("order.placed", theirs), using=None, raises=False
        ) == ["outage"]
        both._store.make_current(both._masters.ids[0])
    for with_keys, payload, verdict in (
        (fresh, damaged, "retry"),
        (away, protected, "outage"),
        (SubjectKeys(keys_dsn, master_key=OTHER), protected, "outage"),
        (keys, unknown, "retry"),
        (away, {"a": "outbox-encrypted:1:x"}, "retry"),
        (away, {"a": "outbox-erased:"}, "handled"),
    ):
        seen: list[Any] = []
        consumer = a_consumer(seen, with_keys, dict)
        assert handle(consumer, make_event("order.placed", payload), using=None, raises=False) == [verdict]
        assert seen == ([payload] if verdict == "handled" else [])
    escaped = make_event("order.placed", value=json.dumps(unknown).replace("outbox", "\\u006futbox").encode())
    assert handle(a_consumer(seen, keys), escaped, using=None, raises=False) == ["retry"]


@pytest.mark.slow
def test_the_key_store_is_unavailable_for_a_while(place: Place, keys: SubjectKeys, keys_dsn: str) -> None:
    """Guards against dead letters of an outage, and events that are not handled after it, or twice."""

    def send(n: int) -> None:
        payload = keys.protect({"n": n, "a": "x"}, {"a": n})
        place.put(
            json.dumps(payload),
            key=str(n),
            id=str(uuid7()),
            event_type="order.placed",
            aggregate_type="order",
        )

    with Proxy(int(psycopg.conninfo.conninfo_to_dict(keys_dsn)["port"] or 0)) as proxy:
        there = psycopg.conninfo.make_conninfo(keys_dsn, host="127.0.0.1", port=proxy.port)
        consumer = place.consumer(max_attempts=1, keys=SubjectKeys(there, master_key=MASTER, cache_seconds=0))
        send(0)
        with running(consumer):
            wait_until(lambda: place.effects() == 1)
            proxy.refuse()
            proxy.cut()
            for n in (1, 2, 3):
                send(n)
            wait_until(lambda: proxy.refused >= 3, what="several attempts")
            assert place.effects() == 1
            assert place.value("SELECT max(attempts) FROM inbox") == 0
            proxy.heal()
            wait_until(lambda: place.effects() == 4, what="the events of the outage")
    assert sorted(n for (n,) in place.rows("SELECT n FROM effects")) == [0, 1, 2, 3]
    assert place.value("SELECT count(*) FROM inbox WHERE state <> 'processed'") == 0


def test_without_keys_nothing_changes() -> None:
    """Guards against a consumer that fails because its producer encrypts members now."""
    seen: list[Any] = []
    payload = {"a": "outbox-encrypted:1:x", "b": "outbox-erased"}
    assert handle(a_consumer(seen, None), make_event("order.placed", payload), using=None) == ["handled"]
    assert seen[0].payload == payload
    with pytest.raises(SetupError, match="keys is 'postgresql://keys': write for example SubjectKeys"):
        a_consumer([], "postgresql://keys")
