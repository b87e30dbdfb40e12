"""The first minute: an order and its event in one transaction; relayed; handled once.

    outbox local run -- sh -c 'outbox migrate && python examples/hello.py'

Invariants:
- It can be run again: each run adds an order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psycopg

from outbox_pipelines.consumer import Consumer, Event, migrate
from outbox_pipelines.writer import emit

TABLES = """
CREATE TABLE IF NOT EXISTS hello_orders (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, total int NOT NULL);
CREATE TABLE IF NOT EXISTS hello_invoices (order_id int PRIMARY KEY, total int NOT NULL)"""

dsn, kafka = os.environ["OUTBOX_DSN"], os.environ["OUTBOX_KAFKA"]
with psycopg.connect(dsn) as connection:
    connection.execute(TABLES)
    migrate(connection)  # the consumer's tables

with psycopg.connect(dsn) as connection:  # one transaction
    cursor = connection.execute("INSERT INTO hello_orders (total) VALUES (5) RETURNING id")
    ((order,),) = cursor.fetchall()
    emit(connection, "hello", order, "order.placed", {"total": 5})
print(f"written  order {order} and its event", flush=True)

# In production the relay is a service of its own.
subprocess.run([sys.executable, "-m", "outbox_pipelines", "relay", "--until-empty"], check=True)
print("relayed  to the topic hello-events", flush=True)

consumer = Consumer(source="hello", topics=["hello-events"], kafka={"bootstrap.servers": kafka}, dsn=dsn)
handled = threading.Event()


@consumer.on("order.placed")
def invoice(event: Event, connection: psycopg.Connection[tuple[int]]) -> None:
    """Its effect commits together with the record that the event is handled."""
    connection.execute(
        "INSERT INTO hello_invoices VALUES (%s, %s)", [event.aggregate_id, event.payload["total"]]
    )
    if event.aggregate_id == str(order):
        handled.set()


consumer.run(handled)
print(f"handled  order {order} has its invoice")
