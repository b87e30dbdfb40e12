"""Lets Debezium's connector publish in place of the relay, and the relay in place of the connector.

Invariants:
- The two never publish at the same time: the connector is registered when the relay has left the slot, and
  the relay continues when the connector is stopped and nothing reads the slot.
- The shard's row says how far the change is, and names a connector until it is removed from Kafka Connect. A
  command that was interrupted is run again, with any target.

While the connector publishes, the relay keeps the shard and follows the slot: `followed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final

from outbox_pipelines import slot_reader
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium import registration
from outbox_pipelines.debezium.config import connector
from outbox_pipelines.debezium.connect import Connect
from outbox_pipelines.debezium.names import connector_name
from outbox_pipelines.errors import NotReadyError, OperatorError, SetupError
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.setup import NO_RELAY, current_name, lock, set_up
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
        slot = current_name(settings, connection)
        config = connector(settings, slot=slot, publication=slot, **place)
        _require_free(connection, cluster, name, slot)
        if wrong := cluster.validate(config):
            lines = [f"{setting}: {error}" for setting, errors in sorted(wrong.items()) for error in errors]
            raise registration.InvalidError(name, lines)
        if _state(connection)[1] == "ends":
            from_connector(settings, seconds=seconds, say=say)
        if _state(connection)[1] is None:
            set_up(settings, seconds=seconds, say=say)
        with lock(connection, settings):
            _, state = _state(connection)
            if state == "ends":
                raise NotReadyError(NO_RELAY)
            if state != "publishes":
                # Its progress would be older than the slot: Debezium fails with that.
                _remove_left(connection, cluster, name, seconds=seconds, say=say)
                _leave_slot(connection, name, seconds=seconds, say=say)
            try:
                _start(settings, connection, cluster, name, config, seconds=seconds, say=say)
            except BaseException:
                # A connector that published before this call still does.
                if state != "publishes":
                    _give_back(connection, cluster, name, seconds=seconds, say=say)
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
        if name is None and state is None:
            return False
        connection.execute(queries.CANCEL_CONNECTOR)
        if state == "begins":
            say("the relay keeps the slot")
            return True
        cluster = Connect(settings.require_connect()) if settings.connect else None
        if state == "publishes":
            if cluster is not None and name is not None:
                registration.stop(cluster, name, seconds=seconds)
                say(f"connector {name}: stopped")
            what = f"the connector {name} (set OUTBOX_CONNECT, and this command does it)"
            _await_unread(connection, what, seconds=seconds)
            connection.execute(queries.END_CONNECTOR)
        # The relay looks into the slot and the topics, and needs the connector's own progress no more.
        if name is not None:
            _remove_left(connection, cluster, name, seconds=seconds, say=say)
        if state is None:
            return False
        if _is_taken_back(connection, seconds=seconds):
            say("the relay continues where the connector has stopped")
        else:
            say("no relay runs: the next one finds out what the connector has published, and continues")
        return True


def _require_free(connection: Connection, cluster: Connect, name: str, slot: str) -> None:
    """Raise `SetupError` if a change to another connector is not complete, or this one is another's."""
    other, state = _state(connection)
    if other is not None and other != name:
        raise SetupError(
            f"the connector {other} is the outbox's ({state or 'to be removed'}), and OUTBOX_CONNECTOR names "
            f"{name}: set OUTBOX_CONNECTOR={other}, or run `outbox cutover --to cdc` first"
        )
    before = registration.existing(cluster, name)
    if before is not None and before.get("slot.name") != slot:
        raise SetupError(
            f"the connector {name} reads the slot {before.get('slot.name')} instead of {slot}: run `outbox "
            "debezium delete` first, or set OUTBOX_CONNECTOR to another name"
        )


def _start(
    settings: Settings,
    connection: Connection,
    cluster: Connect,
    name: str,
    config: dict[str, str],
    *,
    seconds: float,
    say: Say,
) -> None:
    """Register the connector, or start it if it exists, and wait until it reads the slot."""
    if connection.execute(queries.HAS_SLOT).fetchone() is None:
        # A new slot would begin after events that neither has published.
        raise SetupError(
            "the slot is missing, so the connector cannot continue: run `outbox cutover --to polling`; the "
            "relay then looks into the topics for what was published"
        )
    if registration.existing(cluster, name) is None:
        _await_unread(connection, "the relay that has left it", seconds=seconds)
    else:
        # It was stopped by a command that was interrupted, or by a person.
        cluster.resume(name)
    registration.register(settings, config, replace=True, dry_run=False, seconds=seconds, say=say)
    registration.wait_until_read(connection, cluster, name, config["slot.name"], seconds=seconds)


def _give_back(connection: Connection, cluster: Connect, name: str, *, seconds: float, say: Say) -> None:
    """Let the relay continue in place of a connector that does not run, if it is certain that it does not."""
    try:
        _remove_left(connection, cluster, name, seconds=seconds, say=say)
    except OperatorError as error:
        # Its registration may have arrived: then both would publish.
        say(f"connector {name}: it is not known whether it runs ({error}). Run `outbox cutover --to cdc`")
        return
    connection.execute(queries.END_CONNECTOR)
    connection.execute(queries.FORGET_CONNECTOR)
    say("the relay continues")


def _remove_left(
    connection: Connection, cluster: Connect | None, name: str, *, seconds: float, say: Say
) -> None:
    """Remove a connector that does not publish any more, with its progress."""
    if cluster is None:
        say(f"remove the connector {name} and its offsets from Kafka Connect (OUTBOX_CONNECT is not set)")
    elif registration.existing(cluster, name) is not None:
        registration.remove(cluster, name, seconds=seconds)
        say(f"connector {name}: removed")
    connection.execute(queries.FORGET_CONNECTOR)


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
    row = connection.execute(queries.NAMED).fetchone()
    assert row is not None
    if row[0] is not None and (reader := slot_reader.await_end(connection, row[0], seconds=seconds)):
        raise NotReadyError(
            f"{reader} still reads the slot {row[0]}: stop {what}, then run the command again"
        )


def _is_taken_back(connection: Connection, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _state(connection)[1] is not None:
        row = connection.execute(queries.IS_READ).fetchone()
        if row is None or not row[1] or time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _state(connection: Connection) -> tuple[str | None, str | None]:
    row = connection.execute(queries.CONNECTOR).fetchone()
    assert row is not None
    return row[0], row[1]
