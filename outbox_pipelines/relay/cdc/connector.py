"""Lets Debezium's connector publish in place of the relay, and the relay in place of the connector.

Invariants:
- The two never publish at the same time: the connector is registered when the relay has left the slot, and
  the relay continues when the connector is stopped and nothing reads the slot.
- The shard's row says how far the change is. A command that was interrupted is run again, with any target.

While the connector publishes, the relay keeps the shard and follows the slot: `followed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, Final

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium import registration
from outbox_pipelines.debezium.config import connector
from outbox_pipelines.debezium.connect import Connect, MissingError
from outbox_pipelines.debezium.names import connector_name
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.setup import lock, set_up, slot_name
from outbox_pipelines.schema import require_schema
from outbox_pipelines.settings import Settings

_POLL: Final = 0.1

Say = Callable[[str], None]


def to_connector(settings: Settings, place: Mapping[str, Any], *, seconds: float, say: Say) -> None:
    """Let the connector publish from where the relay stops.

    Args:
        place: how the workers reach the database, as `config.connector` takes it.
        seconds: how long to wait for running transactions, the relay and the connector, at most, each.

    Raises:
        SetupError: something is missing; the relay publishes as before.
        NotReadyError: it took too long; the relay publishes as before.
    """
    require_schema(settings)
    cluster, name = Connect(settings.require_connect()), connector_name(settings)
    with closing(connect(settings, name="outbox cutover")) as connection:
        slot = slot_name(settings, connection.info.dbname)
        config = connector(settings, slot=slot, publication=slot, **place)
        _, state = _state(connection)
        if state == "ends":
            raise SetupError("the connector is being ended: run `outbox cutover --to cdc` first")
        if wrong := cluster.validate(config):
            lines = [f"{setting}: {error}" for setting, errors in sorted(wrong.items()) for error in errors]
            raise registration.InvalidError(name, lines)
        if state is None:
            set_up(settings, seconds=seconds, say=say)
        with lock(connection, settings):
            if state != "publishes":
                _leave_slot(connection, name, seconds=seconds, say=say)
            try:
                _await_unread(connection, "the relay that has left it", seconds=seconds)
                registration.register(settings, config, replace=True, dry_run=False, seconds=seconds, say=say)
            except BaseException:
                # A connector that published before this call still does.
                if state != "publishes":
                    connection.execute(queries.END_CONNECTOR)
                    say("the relay continues")
                raise
    say(f"the connector {name} publishes from where the relay has stopped")


def from_connector(settings: Settings, *, seconds: float, say: Say) -> bool:
    """Let the relay publish from where the connector stops; return False if no connector publishes.

    Args:
        seconds: how long to wait for the end of the connector's task, and for the relay, at most, each.

    Raises:
        NotReadyError: the connector did not stop in time: run it again.
    """
    require_schema(settings)
    with closing(connect(settings, name="outbox cutover")) as connection, lock(connection, settings):
        name, state = _state(connection)
        if name is None:
            return False
        connection.execute(queries.CANCEL_CONNECTOR)
        if state == "begins":
            say("the relay keeps the slot")
            return True
        cluster = Connect(settings.require_connect()) if settings.connect else None
        if cluster is not None:
            registration.stop(cluster, name, seconds=seconds)
            say(f"connector {name}: stopped")
        what = f"the connector {name} (set OUTBOX_CONNECT, and this command does it)"
        _await_unread(connection, what, seconds=seconds)
        connection.execute(queries.END_CONNECTOR)
        if not _is_taken_back(connection, seconds=seconds):
            say("no relay runs: the next one finds out what the connector has published, and continues")
            return True
        say("the relay continues where the connector has stopped")
        if cluster is not None:
            with suppress(MissingError):
                registration.remove(cluster, name, seconds=seconds)
                say(f"connector {name}: removed")
        return True


def _leave_slot(connection: Connection, name: str, *, seconds: float, say: Say) -> None:
    """Wait until the relay has left the slot at a point where everything before is published."""
    connection.execute(queries.BEGIN_CONNECTOR, {"connector": name})
    deadline = time.monotonic() + seconds
    try:
        while True:
            _, state = _state(connection)
            if state == "publishes":
                say("the relay has left the slot, and follows it")
                return
            if state is None:
                raise NotReadyError(
                    "the slot was dropped, or the change was cancelled: run the command again"
                )
            if time.monotonic() > deadline:
                raise NotReadyError(_why(connection, seconds))
            time.sleep(_POLL)
    except BaseException:
        connection.execute(queries.CANCEL_CONNECTOR)
        raise


def _why(connection: Connection, seconds: float) -> str:
    after = f"the relay has not left the slot within {seconds:.0f} s, and publishes as before"
    waiting = connection.execute(queries.WAITING).fetchone()
    if waiting is not None and waiting[0]:
        return (
            f"{after}: {waiting[0]} events are parked, which only a relay publishes. Replay or discard what "
            "blocks them (`outbox dead-letters`), then run the command again"
        )
    row = connection.execute(queries.IS_READ).fetchone()
    if row is None or not row[1]:
        return f"{after}: no relay runs. Start one, then run the command again"
    return f"{after}: it publishes a backlog, or cannot read the slot (`outbox cdc status`)"


def _await_unread(connection: Connection, what: str, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (row := connection.execute(queries.SLOT_READER).fetchone()) is not None:
        if time.monotonic() > deadline:
            raise NotReadyError(
                f"process {row[0]} still reads the slot: stop {what}, then run the command again"
            )
        time.sleep(_POLL)


def _is_taken_back(connection: Connection, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _state(connection)[0] is not None:
        row = connection.execute(queries.IS_READ).fetchone()
        if row is None or not row[1] or time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _state(connection: Connection) -> tuple[str | None, str | None]:
    row = connection.execute(queries.CONNECTOR).fetchone()
    assert row is not None
    return row[0], row[1]
