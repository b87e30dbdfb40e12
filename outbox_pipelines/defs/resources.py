"""The settings, as Dagster's jobs and sensors are given them."""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from outbox_pipelines.settings import Settings, load_settings


class OutboxResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Which outbox to work on: what the environment says, unless overridden here.

    Nothing is required, and nothing is read before a job or a sensor asks for it: definitions load on a
    machine without any settings.

    Example:
        ```python
        OutboxResource(dsn="postgresql://relay@db/shop", session_seconds=300)
        ```
    """

    dsn: str | None = Field(default=None, description="instead of OUTBOX_DSN")
    kafka: str | None = Field(default=None, description="instead of OUTBOX_KAFKA")
    db_schema: str | None = Field(default=None, description="instead of OUTBOX_SCHEMA")
    topic: str | None = Field(default=None, description="instead of OUTBOX_TOPIC")
    catalog: str | None = Field(default=None, description="instead of OUTBOX_CATALOG")
    archive: str | None = Field(default=None, description="instead of OUTBOX_ARCHIVE")
    drain: str | None = Field(default=None, description="instead of OUTBOX_DRAIN")
    session_seconds: float | None = Field(default=None, description="instead of OUTBOX_SESSION_SECONDS")

    def settings(self) -> Settings:
        """The settings of now.

        Raises:
            SetupError: a value does not fit; the message names the setting.
        """
        return load_settings(**self.model_dump())


@dg.definitions
def shared() -> dg.Definitions:
    """What every job and sensor here gets."""
    return dg.Definitions(
        resources={"outbox": OutboxResource()},
        # A process for each step costs twice the CPU of a run, and no job here gains by it.
        executor=dg.in_process_executor,
    )
