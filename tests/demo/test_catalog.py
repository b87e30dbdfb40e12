"""The demo's event catalog describes what the demo writes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from examples.airline import airline as operations_service
from outbox_pipelines.catalog import validator
from outbox_pipelines.catalog.comparison import compare
from outbox_pipelines.database import connect
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import validate_with
from tests.demo.test_airline import FLIGHT, GROUNDED

PATH = Path(str(files("examples.airline") / "catalog.yaml"))


def test_it_documents_what_the_demo_writes(airline: Settings) -> None:
    """Guards against a sample that teaches something else than it shows."""
    validate_with(validator(PATH))
    try:
        with connect(airline, name="test") as connection, connection.transaction():
            operations_service.schedule(connection, [FLIGHT, GROUNDED])
            operations_service.depart(connection, FLIGHT)
            operations_service.arrive(connection, FLIGHT)
            operations_service.cancel(connection, GROUNDED)
    finally:
        validate_with(None)
    compared = compare(airline.model_copy(update={"catalog_file": PATH}))
    assert {each.event_type: each.status for each in compared} == dict.fromkeys(
        ("flight.scheduled", "flight.departed", "flight.arrived", "flight.cancelled"), "ok"
    )
