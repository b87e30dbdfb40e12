"""`examples/dapr_shop` behind the real sidecar, with the components of the example."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, wait_until
from tests.examples.services import EXAMPLES, python, serving
from tests.interop.sidecar import Sidecar
from tests.schema.servers import Database

SHOP = EXAMPLES / "dapr_shop"


def test_an_order_becomes_an_invoice(
    daprd: Path, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against components that Dapr does not accept, and a route that does not exist."""
    dsn = outbox.settings.dsn.reveal()
    monkeypatch.setenv("OUTBOX_KAFKA", outbox.settings.kafka)
    # Names of this test's own: others use the same Kafka.
    names = {"order-events": outbox.topic(), "value: billing": f"value: {uuid.uuid4().hex}"}
    components = {path.stem: path.read_text() for path in (SHOP / "components").iterdir()}
    for theirs, ours in names.items():
        assert sum(text.count(theirs) for text in components.values()) == 1
        components = {stem: text.replace(theirs, ours) for stem, text in components.items()}
    app = python("-m", "uvicorn", "--port", "0", "app:app")
    with serving(app, Database(dsn, Path()), SHOP) as client:
        sidecar = Sidecar(daprd, tmp_path / "daprd", "shop", client.base_url.port, components)
        try:
            sidecar.start()
            # A line break does no harm: headers are escaped.
            ids = [str(client.post("/orders", json={"total": total}).json()["id"]) for total in (5, 6)]
            outbox.write("4\n2", event_type="order.cancelled")
            settings = load_settings(
                dsn=dsn, kafka=outbox.settings.kafka, topic=outbox.settings.topic, value_format="cloudevents"
            )
            assert service.relay(settings, until_empty=True).events == 3

            def invoices() -> list[tuple[object, ...]]:
                with outbox.connect() as connection:
                    query = "SELECT order_id, total FROM dapr_invoices ORDER BY total"
                    return connection.execute(query).fetchall()

            wait_until(lambda: len(invoices()) == 2, what="two invoices")
            assert invoices() == [(ids[0], 5), (ids[1], 6)]
            assert "Error processing" not in sidecar.log_text()
        finally:
            sidecar.stop()
