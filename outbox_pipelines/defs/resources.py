"""The settings, as Dagster's jobs and sensors are given them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.errors import SetupError
from outbox_pipelines.secret import has_password
from outbox_pipelines.settings import Settings, load_settings

# What every job and sensor here asks for by a parameter of this name. A user's own resource may be `outbox`.
KEY: Final = "outbox_pipelines"

_resolving: ContextVar[bool] = ContextVar("_resolving", default=False)


class OutboxResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Which outbox to work on: what the environment says, unless overridden here.

    Nothing is required, and nothing is read before a job or a sensor asks for it: definitions load on a
    machine without any settings.

    Example:
        ```python
        OutboxResource(dsn=dg.EnvVar("SHOP_DSN"), session_seconds=300)
        ```

    Dagster stores what is written here, or in a run's configuration, and shows it: a password stands in a
    variable. One that is written here is refused.
    """

    dsn: str | None = Field(default=None, description="instead of OUTBOX_DSN")
    kafka: str | None = Field(default=None, description="instead of OUTBOX_KAFKA")
    db_schema: str | None = Field(default=None, description="instead of OUTBOX_SCHEMA")
    topic: str | None = Field(default=None, description="instead of OUTBOX_TOPIC")
    catalog_file: str | None = Field(default=None, description="instead of OUTBOX_CATALOG_FILE")
    archive: str | None = Field(default=None, description="instead of OUTBOX_ARCHIVE")
    consumers_file: str | None = Field(default=None, description="instead of OUTBOX_CONSUMERS_FILE")
    drain_consumers: str | None = Field(default=None, description="instead of OUTBOX_DRAIN_CONSUMERS")
    session_seconds: float | None = Field(default=None, description="instead of OUTBOX_SESSION_SECONDS")

    def __init__(self, **given: Any) -> None:
        # What stands in a definition is in Dagster's snapshots and on its pages.
        for name in ("dsn", "archive"):
            value = given.get(name)
            if not isinstance(value, str) or isinstance(value, dg.EnvVar) or _resolving.get():
                continue
            if has_password(value):
                raise SetupError(
                    f"OutboxResource has a password in {name}, which Dagster stores and shows: write "
                    f'{name}=dg.EnvVar("NAME"), or leave it out and set OUTBOX_{name.upper()}'
                )
        super().__init__(**given)

    def _with_updated_values(self, values: Mapping[str, Any] | None) -> Any:
        """Dagster makes another one for each run, in which variables have become their values."""
        token = _resolving.set(True)
        try:
            return super()._with_updated_values(values)
        finally:
            _resolving.reset(token)

    def settings(self) -> Settings:
        """The settings of now.

        Raises:
            SetupError: a value does not fit; the message names the setting.
        """
        return load_settings(**self.model_dump())
