"""Create the table that `outbox adopt` uses."""

from __future__ import annotations

from django.db import migrations

from outbox_pipelines.django.operations import CreateOutbox


class Migration(migrations.Migration):  # type: ignore[misc]
    dependencies = (("outbox_pipelines", "0001_outbox"),)
    operations = (CreateOutbox(up_to="0009_adopted"),)
