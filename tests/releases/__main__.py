"""`make release-dump`: makes an installation of this version and writes it into `tests/releases`.

Until a version is released, its dump is made again with each change of what it has; then it is frozen.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from outbox_pipelines import __version__
from outbox_pipelines.local import stack as local_stack
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, fresh_database, session, topic_prefix
from tests.releases import dagster_storage, dump, installation

prefix, roles = topic_prefix(), f"{installation.WRITER}, {installation.OPERATOR}"
with local_stack(load_settings()) as stack, TemporaryDirectory() as place:
    for role in roles.split(", "):
        session(stack.dsn).execute(f"CREATE ROLE {role}".encode())
    try:
        with fresh_database(stack.dsn) as dsn:
            topic = f"{prefix}-{{aggregate_type}}-events"
            settings = load_settings(dsn=dsn, kafka=stack.kafka, topic=topic)
            with dagster_storage.opened(Path(place) / "dagster") as instance:
                installation.make(Outbox(settings), Path(place), instance)
            dump.write(dsn, prefix, Path(place), dump.FOLDER / __version__)
    finally:
        session(stack.dsn).execute(f"DROP ROLE {roles}".encode())
