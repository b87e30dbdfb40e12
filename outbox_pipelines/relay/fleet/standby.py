"""The session with which a process is standby for the shards of an outbox that it does not relay.

Invariants:
- It takes no shard, and no relay that is alone notices it: a check takes a lock within one statement.
- A frozen process is no longer a standby: the database ends its session after the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from outbox_pipelines.database import Connection, connect, refuse_standby
from outbox_pipelines.database.schema import no_position
from outbox_pipelines.relay import kinds, relay_sql
from outbox_pipelines.relay.fleet import fleet_sql
from outbox_pipelines.relay.lease.owner_session import limit_silence
from outbox_pipelines.settings import ProcessSettings


class Look(NamedTuple):
    """The observed state of a shard."""

    shard: int
    is_free: bool


class Standby:
    """An open session; for one thread.

    Args:
        settings: of the outbox.

    Raises:
        SetupError: the database is unavailable, or has no outbox.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._key = fleet_key(settings)
        kind = kinds.of(settings)
        kind.check(settings)
        self._connection: Connection = connect(settings, name="outbox relay: fleet")
        try:
            refuse_standby(self._connection)
            self._table = kind.lock_of_all(settings, self._connection)
            limit_silence(self._connection, settings)
            identity = self._connection.execute(relay_sql.IDENTITY).fetchone()
            self._is_counted = False
            self.tables = (identity, settings.db_schema, self._table)
            """Equal for two outboxes that are the same tables."""
        except BaseException:
            self._connection.close()
            raise

    def shards(self) -> list[int]:
        """Return the shards of the outbox."""
        if self._table is not None:
            return [0]
        found = [shard for (shard,) in self._connection.execute(relay_sql.SHARD_NUMBERS).fetchall()]
        if not found:
            raise no_position(self._settings.db_schema)
        return found

    def looks(self, shards: Iterable[int]) -> Iterator[Look]:
        """Yield whether each of these is free."""
        if self._table is not None:
            yield Look(0, self._is(fleet_sql.TABLE_IS_FREE, {"key": self._table}))
            return
        for shard in shards:
            lock = {"lock": f"{self._settings.db_schema}.outbox_shards", "shard": shard}
            yield Look(shard, self._is(fleet_sql.IS_FREE, lock))

    def standbys(self) -> int:
        """Return the number of standby processes, this one included."""
        if not self._is_counted:
            self._is_counted = self._is(fleet_sql.STAND_BY, self._key)
        row = self._connection.execute(fleet_sql.STANDBYS, self._key).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """End the standby session."""
        self._connection.close()

    def _is(self, query: Any, parameters: dict[str, Any]) -> bool:
        return self._connection.execute(query, parameters).fetchone() == (True,)


def fleet_key(settings: ProcessSettings) -> dict[str, str]:
    """Return the parameters that name the lock of an outbox's standby processes."""
    return {"fleet": f"{settings.db_schema}.{kinds.of(settings).fleet_name(settings)}.fleet"}
