"""The state of an outbox's slot."""

from __future__ import annotations

from contextlib import closing

from outbox_pipelines.database import connect
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.quality import quality_sql
from outbox_pipelines.quality.measurements import slots
from outbox_pipelines.quality.slots import Slots
from outbox_pipelines.settings import Settings


def read(settings: Settings) -> Slots:
    """Return the state of the slots that concern an outbox.

    Raises:
        SetupError: the outbox is not set up.
    """
    require_schema(settings)
    with closing(connect(settings, name="outbox cdc status")) as connection:
        row = connection.execute(
            quality_sql.SLOTS, {"setup_lock": f"{settings.db_schema}.outbox_cdc"}
        ).fetchone()
    assert row is not None
    return slots(row[0])
