"""Days of the past with events that refer to bodies, and bodies of transactions that were rolled back."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.days.bodies import store
from outbox_pipelines.days.bodies.sweep import Swept, sweep
from outbox_pipelines.days.partitions import close
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer.references import Body
from tests.days.archive.days import at, days_ago, make_days, publish, writing
from tests.schema.events import insert
from tests.schema.servers import Connection, Database

DAY, NEXT = days_ago(3), days_ago(2)


class Stored:
    """An outbox whose store is its own."""

    def __init__(self, database: Database, url: str, archive: Path) -> None:
        self.database = database
        self.settings: Settings = database.settings.model_copy(
            update={"bodies": url, "archive": str(archive), "close_after_minutes": 0.0}
        )
        self.bodies = Bodies(url)
        make_days(database, DAY)
        store.adopt(self.settings)

    def put(self, day: date = DAY, content: bytes = b"content") -> str:
        """Store a body of a transaction; return the payload of its event."""
        [payload] = self.bodies.put(str(day), [Body("null", self.bodies, content, "text/plain")])
        return payload

    def write(self, payload: str | None = None, day: date = DAY) -> str:
        """Commit an event of this day that refers to a body; return the body's key."""
        payload = payload or self.put(day)
        with writing(self.database) as connection:
            self.insert(connection, payload, day)
        return key_of(payload)

    def insert(self, connection: Connection, payload: str, day: date = DAY) -> None:
        insert(connection, created_at=at(day, 1), payload=Jsonb(json.loads(payload)))

    def close(self, *days: date) -> None:
        """Publish what is committed, and close days."""
        publish(self.database)
        for day in days or (DAY, NEXT):
            (closing,) = close.close(self.settings, day)
            assert closing.closed, closing.why_not

    def sweep(self, **given: Any) -> Swept:
        """Sweep one day, DAY by default."""
        day = given.pop("day", DAY)
        (swept,) = sweep(self.settings, day, day, **given)
        return swept

    def keys(self, day: date = DAY) -> set[str]:
        """The bodies of a day that there are."""
        return {*self.bodies.objects(day)}

    def outbox(self, *arguments: str) -> Any:
        """Run a command."""
        return self.database.outbox(
            *arguments, OUTBOX_BODIES=self.settings.bodies, OUTBOX_ARCHIVE=self.settings.archive
        )


def key_of(payload: str) -> str:
    key: str = json.loads(payload)["outbox-body"]["key"]
    return key
