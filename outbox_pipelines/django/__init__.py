"""The outbox as a Django app: `INSTALLED_APPS += ["outbox_pipelines.django"]`, then `manage.py migrate`.

The app has no models. Events are written with `outbox_pipelines.writer.emit(connection, …)` in
`transaction.atomic()`. If a project has several databases, its router selects those that have an outbox
with `allow_migrate(db, "outbox_pipelines")`.
"""
