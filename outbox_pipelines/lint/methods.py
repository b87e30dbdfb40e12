"""Names of methods and functions, by what they do. What they are called on decides whether it counts."""

from __future__ import annotations

from typing import Final

from outbox_pipelines.lint.sql_statements import Effect
from outbox_pipelines.lint.story import Act

EXECUTING: Final = {
    "execute",
    "executemany",
    "execute_values",
    "execute_batch",
    "exec_driver_sql",
    "fetch",
    "fetchrow",
    "fetchval",
    "scalar",
    "scalars",
    "exec",
    "stream",
    "copy",
}
SESSION_WRITES: Final = {
    "add",
    "add_all",
    "merge",
    "delete",
    "bulk_save_objects",
    "bulk_insert_mappings",
    "bulk_update_mappings",
}
CONSTRUCTS: Final = {
    "insert": Effect.WRITE,
    "update": Effect.WRITE,
    "delete": Effect.WRITE,
    "select": Effect.READ,
}
CONTROLLING: Final = {
    "begin": Act.BEGIN,
    "start": Act.BEGIN,
    "commit": Act.COMMIT,
    "rollback": Act.ROLLBACK,
}
# Of tests that want an error.
WANTING: Final = {"raises", "assertRaises", "assertRaisesRegex"}
PUBLISHING: Final = {
    "produce",
    "send",
    "send_and_wait",
    "send_batch",
    "send_soon",
    "publish",
    "publish_batch",
    "basic_publish",
}
# Of Celery's tasks and application.
QUEUING: Final = {"delay", "apply_async", "send_task", "delay_on_commit", "apply_async_on_commit"}
# Of Django's managers and query sets.
MANAGER_WRITES: Final = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in (
        "create",
        "bulk_create",
        "bulk_update",
        "get_or_create",
        "update_or_create",
        "update",
        "delete",
    )
} | {"create_user", "create_superuser"}
# Of these a row comes back.
MANAGER_ROWS: Final = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in ("create", "get", "first", "last", "latest", "earliest")
} | {"create_user", "create_superuser"}
ROW_WRITES: Final = {"save", "delete", "asave", "adelete"}
# What the views of the REST framework do with their serializer.
VIEW_WRITES: Final = {
    "create",
    "update",
    "partial_update",
    "destroy",
    "perform_create",
    "perform_update",
    "perform_destroy",
}
# Functions that run another one in a thread, with its place among their arguments.
RUNNING: Final = {"run_in_threadpool": 0, "to_thread": 0, "to_thread.run_sync": 0, "run_in_executor": 1}
# Of exit stacks.
ENTERING: Final = {"enter_context", "enter_async_context"}
