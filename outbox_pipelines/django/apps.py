"""The configuration of the Django app."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]
    name = "outbox_pipelines.django"
    # The default label, the last part of the name, is `django`.
    label = "outbox_pipelines"
    verbose_name = "Outbox Pipelines"
