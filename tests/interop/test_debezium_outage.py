"""A long outage of Kafka below Debezium, with the workers' settings of docs/debezium-on-connect.md."""

from __future__ import annotations

import time
from pathlib import Path

from outbox_pipelines.database import schema
from outbox_pipelines.debezium.connector_reading import read
from outbox_pipelines.local import kafka, postgres
from outbox_pipelines.settings import load_settings
from tests.conftest import password_of, wait_until
from tests.interop.connect_workers import cluster
from tests.interop.test_debezium_on_connect import Shop

# Longer than the session of a worker (6 s), so that it leaves its group, and than a request of its producer.
OUTAGE_SECONDS = 40.0


def test_it_continues_after_an_outage_of_kafka(tmp_path: Path) -> None:
    """Guards against advice that leaves an orphaned task on the slot, with a state of RUNNING.

    Without the setting, nothing is confirmed after the outage until the worker's process is ended.
    """
    patient = {"task.shutdown.graceful.timeout.ms": 120_000}
    with (
        postgres.Postgres(tmp_path / "postgres") as server,
        kafka.Kafka(tmp_path / "kafka") as broker,
        cluster(tmp_path, broker.bootstrap, patient, workers=1) as (worker,),
    ):
        secret = tmp_path / "secret.properties"
        secret.write_text(f"password={password_of(server.dsn)}\n")
        settings = load_settings(dsn=server.dsn, kafka=broker.bootstrap, connect_url=worker.url)
        schema.migrate(settings)
        shop = Shop(settings, f"${{file:{secret}:password}}")
        shop.register()
        shop.write("1")
        wait_until(lambda: shop.published() == ["1"], seconds=60, what="the first event")
        broker.freeze()
        try:
            shop.write("2")
            time.sleep(OUTAGE_SECONDS)
            assert read(settings).problems != []
        finally:
            broker.thaw()
        shop.write("3")
        wait_until(lambda: set(shop.published()) == {"1", "2", "3"}, seconds=60, what="all events")
        wait_until(lambda: read(settings).waiting_seconds == 0, seconds=60, what="their confirmation")
        assert read(settings).problems == []
        shop.delete()
