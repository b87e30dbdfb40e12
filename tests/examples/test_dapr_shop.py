"""The application of `examples/dapr_shop`, posted to as a sidecar does; `make interop` has the sidecar."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psycopg
import pytest
import yaml

from outbox_pipelines.core.event import Event as Row
from outbox_pipelines.relay.kafka.message import Encoder
from outbox_pipelines.settings import load_settings
from tests.examples.services import EXAMPLES, Event, events, python, serving
from tests.schema.servers import Database

SHOP = EXAMPLES / "dapr_shop"
# As version 2 of Dapr's store creates it.
STATE = (
    "CREATE TABLE state (key text NOT NULL PRIMARY KEY, value bytea NOT NULL, "
    "etag uuid NOT NULL DEFAULT gen_random_uuid(), created_at timestamptz NOT NULL DEFAULT now(), "
    "updated_at timestamptz, expires_at timestamptz)"
)
SAVE = (
    "INSERT INTO state AS t (key, value, etag, expires_at) VALUES (%s, %s, gen_random_uuid(), NULL) "
    "ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value, updated_at = now(), etag = gen_random_uuid()"
)


@pytest.fixture
def shop(database: Database) -> Iterator[httpx.Client]:
    with serving(python("-m", "uvicorn", "--port", "0", "app:app"), database, SHOP) as client:
        yield client


def _paths() -> list[str]:
    routes = yaml.safe_load((SHOP / "components" / "orders.yaml").read_text())["spec"]["routes"]
    return [*(rule["path"] for rule in routes["rules"]), routes["default"]]


@pytest.mark.extended
def test_an_order_has_its_event_and_one_invoice(shop: httpx.Client, database: Database) -> None:
    """Guards against an example that users copy, and that loses events or handles them twice."""
    order = shop.post("/orders", json={"total": 5}).json()["id"]
    assert shop.post("/orders", json={}).status_code == 500
    assert events(database) == [Event("order", str(order), "order.placed", {"total": 5}, None)]
    [row] = database.rows("SELECT id::text, payload::text, created_at::text FROM outbox")
    event = Row(1, row[0], "order", str(order), "order.placed", row[1], f'{{"created-at": "{row[2]}"}}')
    value, headers = Encoder(load_settings(value_format="cloudevents")).encode(event)
    assert value is not None
    # Dapr turns Kafka's headers into headers of HTTP.
    sent = {name: text for name, text in headers if isinstance(text, str)} | {"__key": str(order)}
    for path in _paths():
        for _ in range(2):
            answer = shop.post(path, content=value, headers=sent)
            assert (answer.status_code, answer.json()) == (200, {"status": "SUCCESS"})
    found = database.rows("SELECT event_id::text, order_id, total FROM dapr_invoices")
    assert found == [(event.id, str(order), 5)]


def test_the_trigger_writes_events_in_the_order_of_the_saves(database: Database) -> None:
    """Guards against state without its event, and against events of others' keys."""
    database.rows(STATE)
    trigger = (SHOP / "state_trigger.sql").read_text()
    for _ in range(2):
        database.rows(trigger)
    with database.connect(autocommit=False) as connection:
        for key, value in (
            ("shop||order-42", '{"n": 1}'),
            ("shop||outbox-7", "0"),
            ("shop||order-42", '{"n": 2}'),
        ):
            connection.execute(SAVE, [key, value.encode()])
        connection.commit()
        connection.execute(SAVE, ["shop||order-42", b'{"n": 3}'])
        connection.rollback()
    database.rows("DELETE FROM state")
    assert events(database) == [
        Event("order", "42", "order.created", {"n": 1}, None),
        Event("order", "42", "order.changed", {"n": 2}, None),
        Event("order", "42", "order.removed", None, None),
    ]


def test_a_role_that_is_no_writer_cannot_save(database: Database) -> None:
    """Guards against state that is saved without its event."""
    database.rows(STATE)
    database.rows((SHOP / "state_trigger.sql").read_text())
    role = database.role()
    database.rows(f"GRANT SELECT, INSERT, UPDATE, DELETE ON state TO {role}")
    for has_failed in (True, False):
        with database.connect(user=role) as connection:
            if has_failed:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(SAVE, ["shop||order-42", b"{}"])
            else:
                connection.execute(SAVE, ["shop||order-42", b"{}"])
        assert len(events(database)) == len(database.rows("SELECT key FROM state")) == int(not has_failed)
        database.rows(f"SELECT outbox_grant_writer('{role}')")


def test_a_second_save_waits_for_the_first(database: Database) -> None:
    """Guards against a trigger that draws `seq` before the row is locked."""
    database.rows(STATE)
    database.rows((SHOP / "state_trigger.sql").read_text())
    with database.connect(autocommit=False) as one, database.connect(autocommit=False) as other:
        one.execute(SAVE, ["shop||order-42", b'{"n": 1}'])
        other.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(SAVE, ["shop||order-42", b'{"n": 2}'])
