"""A worker with plain psycopg that ships orders one by one, each in its own transaction.

    outbox local run -- sh -c 'outbox migrate && python examples/worker.py 2 40 7'

The arguments are the weights of the initial orders, in kilograms. Several workers may run concurrently.

Invariants:
- A failed shipment changes neither the row nor writes events; the refusal is a separate, later transaction.
"""

from __future__ import annotations

import os
import sys

import psycopg

from outbox_pipelines.writer import NewEvent, correlated, emit, emit_many

Connection = psycopg.Connection[tuple[int, int]]

TABLE = """
CREATE TABLE IF NOT EXISTS worker_orders (
    id    int  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kilos int  NOT NULL,
    state text NOT NULL DEFAULT 'paid'
)"""
# The row is locked from here on, so that the order of its events is the order of the commits.
TAKE = """
UPDATE worker_orders SET state = 'shipped'
WHERE id = (SELECT id FROM worker_orders WHERE state = 'paid' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id, kilos"""


class RefusedError(Exception):
    """The carrier does not take this order."""

    def __init__(self, order: int) -> None:
        super().__init__(f"order {order} is too heavy")
        self.order = order


def ship_next(connection: Connection) -> bool:
    """Ship the next paid order; return False if there is none."""
    with connection.transaction():
        taken = connection.execute(TAKE).fetchone()
        if taken is None:
            return False
        order, kilos = taken
        parcels = [
            NewEvent("parcel", f"{order}-{packed}", "parcel.sent", {"kilos": min(10, kilos - packed)})
            for packed in range(0, kilos, 10)
        ]
        shipped = NewEvent("order", order, "order.shipped", {"parcels": len(parcels)})
        emit_many(connection, [*parcels, shipped])
        hand_over(order, kilos)
    return True


def hand_over(order: int, kilos: int) -> None:
    """Simulate a call to the carrier, which may refuse the order."""
    if kilos > 30:
        raise RefusedError(order)


def refuse(connection: Connection, order: int) -> None:
    with connection.transaction():
        connection.execute("UPDATE worker_orders SET state = 'refused' WHERE id = %s", [order])
        # The key, because a restarted worker may reach this statement again.
        emit(connection, "order", order, "order.refused", {}, idempotency_key=f"refuse {order}")


def work(connection: Connection) -> None:
    while True:
        try:
            if not ship_next(connection):
                return
        except RefusedError as error:
            print(error)
            refuse(connection, error.order)


def main() -> None:
    with psycopg.connect(os.environ["OUTBOX_DSN"]) as connection:
        connection.execute(TABLE)
        for kilos in sys.argv[1:]:
            connection.execute("INSERT INTO worker_orders (kilos) VALUES (%s)", [int(kilos)])
        connection.commit()
        with correlated(correlation_id=f"worker {os.getpid()}"):
            work(connection)


if __name__ == "__main__":
    main()
