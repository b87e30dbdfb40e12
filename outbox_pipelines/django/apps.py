"""What Django is told of the app."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]
    name = "outbox_pipelines.django"
    # Not the last part of the name, which is Django's own.
    label = "outbox_pipelines"
    verbose_name = "Outbox Pipelines"
