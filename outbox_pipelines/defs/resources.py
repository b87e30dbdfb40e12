"""The Dagster resource that gives jobs and sensors their settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.errors import SetupError
from outbox_pipelines.secret import has_password
from outbox_pipelines.settings import Settings, load_settings

# Every job and sensor here has a parameter of this name. A user's own resource may be named `outbox`.
KEY: Final = "outbox_pipelines"

_resolving: ContextVar[bool] = ContextVar("_resolving", default=False)


class OutboxResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The outbox to work on: the settings of the environment, unless overridden here.

    Nothing is required, and nothing is read before a job or a sensor needs it: definitions load on a
    machine without any settings.

    Example:
        ```python
        OutboxResource(dsn=dg.EnvVar("SHOP_DSN"), session_seconds=300)
        ```

    Dagster stores and shows the values given here or in a run's configuration. Put a password in an
    environment variable; a password given here is refused.
    """

    dsn: str | None = Field(default=None, description="Override OUTBOX_DSN")
    kafka: str | None = Field(default=None, description="Override OUTBOX_KAFKA")
    db_schema: str | None = Field(default=None, description="Override OUTBOX_SCHEMA")
    topic: str | None = Field(default=None, description="Override OUTBOX_TOPIC")
    catalog_file: str | None = Field(default=None, description="Override OUTBOX_CATALOG_FILE")
    archive: str | None = Field(default=None, description="Override OUTBOX_ARCHIVE")
    consumers_file: str | None = Field(default=None, description="Override OUTBOX_CONSUMERS_FILE")
    drain_consumers: str | None = Field(default=None, description="Override OUTBOX_DRAIN_CONSUMERS")
    session_seconds: float | None = Field(default=None, description="Override OUTBOX_SESSION_SECONDS")

    def __init__(self, **given: Any) -> None:
        # Values of a definition are stored in Dagster's snapshots and shown on its pages.
        for name in ("dsn", "archive"):
            value = given.get(name)
            if not isinstance(value, str) or isinstance(value, dg.EnvVar) or _resolving.get():
                continue
            if has_password(value):
                raise SetupError(
                    f"OutboxResource has a password in {name}, and Dagster stores and shows it: use "
                    f'{name}=dg.EnvVar("NAME"), or omit it and set OUTBOX_{name.upper()}'
                )
        super().__init__(**given)

    def _with_updated_values(self, values: Mapping[str, Any] | None) -> Any:
        """Return the copy that Dagster makes for each run, with the values of environment variables."""
        token = _resolving.set(True)
        try:
            return super()._with_updated_values(values)
        finally:
            _resolving.reset(token)

    def settings(self) -> Settings:
        """Return the current settings.

        Raises:
            SetupError: a value is invalid; the message names the setting.
        """
        return load_settings(**self.model_dump())
