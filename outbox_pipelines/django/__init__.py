"""The outbox as an app of Django: `INSTALLED_APPS += ["outbox_pipelines.django"]`, then `manage.py migrate`.

The app has no models. Events are written with `outbox_pipelines.writer.emit(connection, …)` in
`transaction.atomic()`. Where a project has several databases, its router says with `allow_migrate(db,
"outbox_pipelines")` which of them have an outbox.
"""
