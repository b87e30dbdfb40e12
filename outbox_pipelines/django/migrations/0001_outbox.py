"""Create the outbox."""

from __future__ import annotations

from django.db import migrations

from outbox_pipelines.django.operations import CreateOutbox


class Migration(migrations.Migration):  # type: ignore[misc]
    initial = True
    dependencies = ()
    operations = (CreateOutbox(up_to="0008_roles"),)
