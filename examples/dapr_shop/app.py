"""An application of Dapr: it writes events with `emit`, and its sidecar delivers them to it as CloudEvents.

    outbox local run -- sh -c 'outbox migrate && cd examples/dapr_shop &&
        dapr run --app-id shop --app-port 8000 --resources-path components -- uvicorn app:app'
    OUTBOX_VALUE_FORMAT=cloudevents outbox relay      # in another shell

The sidecar reads the topic that the relay publishes to; Dapr's own outbox is not used.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg
from fastapi import FastAPI

from outbox_pipelines.writer import emit

DSN = os.environ["OUTBOX_DSN"]
app = FastAPI()

with psycopg.connect(DSN) as setup:
    setup.execute(
        "CREATE TABLE IF NOT EXISTS dapr_orders "
        "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, total int NOT NULL)"
    )
    # The id of the event: Dapr delivers at least once.
    setup.execute(
        "CREATE TABLE IF NOT EXISTS dapr_invoices "
        "(event_id uuid PRIMARY KEY, order_id text NOT NULL, total int NOT NULL)"
    )


@app.post("/orders", status_code=201)
def place(order: dict[str, int]) -> dict[str, int]:
    """Write the order and its event in one transaction."""
    with psycopg.connect(DSN) as connection:
        row = connection.execute(
            "INSERT INTO dapr_orders (total) VALUES (%s) RETURNING id", [order["total"]]
        ).fetchone()
        assert row is not None
        emit(connection, "order", row[0], "order.placed", {"total": order["total"]})
    return {"id": row[0]}


@app.post("/events/order-placed")
def placed(event: dict[str, Any]) -> dict[str, str]:
    """Handle an event once. After an exception (500) Dapr delivers it again, before later ones."""
    with psycopg.connect(DSN) as connection:
        connection.execute(
            "INSERT INTO dapr_invoices VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
            [event["id"], event["subject"], event["data"]["total"]],
        )
    return {"status": "SUCCESS"}


@app.post("/events/others")
def others() -> dict[str, str]:
    """Accept what has no handler. An answer 404 would do the same, and hide a misspelled route."""
    return {"status": "SUCCESS"}
