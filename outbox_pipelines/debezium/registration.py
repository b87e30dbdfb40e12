"""Registers the connector of an outbox in a Kafka Connect cluster, and removes it.

Invariants:
- The slot is made before the connector and dropped after it: an event that commits while it is registered is
  delivered.
- A slot that was made here and is not used is dropped: no slot is left that keeps the log without a reader.
- An existing connector is changed only on request, and a missing slot below one is never made anew in
  silence: the events in between would be lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium import queries
from outbox_pipelines.debezium import slot as slots
from outbox_pipelines.debezium.config import is_at_dsn
from outbox_pipelines.debezium.connect import Connect, MissingError
from outbox_pipelines.debezium.names import connector_name
from outbox_pipelines.debezium.state import Task
from outbox_pipelines.errors import NotReadyError, OperatorError, SetupError
from outbox_pipelines.settings import Settings

_POLL: Final = 0.25
_SECRET: Final = re.compile(r"(?i)password|secret|jaas|token|credential|\.key\b|sslkey")
_CLEAN_UP_SECONDS: Final = 20.0

Say = Callable[[str], None]


def register(
    settings: Settings,
    config: dict[str, str],
    *,
    replace: bool,
    dry_run: bool,
    seconds: float,
    say: Say,
) -> bool:
    """Register a connector, with its publication and slot; return whether anything was changed.

    Args:
        config: of `config.connector`.
        replace: give an existing connector this configuration.
        dry_run: check everything, say what would be done, and change nothing.
        seconds: how long to wait until its task runs, at most.

    Raises:
        SetupError: it is not possible; nothing has changed, and nothing that was made is left.
        NotReadyError: its task did not run in time; nothing that was made is left.
    """
    cluster, name = Connect(settings.require_connect()), connector_name(settings)
    slot, publication = config["slot.name"], config["publication.name"]
    before = existing(cluster, name)
    changes = [] if before is None else differences(before, config)
    if before is not None and before.get("slot.name") != slot:
        raise SetupError(
            f"the connector {name} reads the slot {before.get('slot.name')} instead of {slot}: give --slot "
            "that name, run `outbox debezium delete` first, or set OUTBOX_CONNECTOR to another name"
        )
    if changes and not replace:
        raise SetupError(
            f"the connector {name} exists with another configuration ({'; '.join(changes)}): add --replace, "
            "or set OUTBOX_CONNECTOR to another name"
        )
    with closing(connect(settings, name="outbox debezium register")) as connection:
        oid = slots.check_server(settings, connection, config["database.user"])
        # Another address may be for the workers alone; then the task shows whether it takes them.
        if is_at_dsn(settings, config):
            slots.check_no_pooler(settings)
        has_publication = slots.has_publication(settings, connection, publication, oid)
        has_slot = slots.has_slot(connection, slot, is_read=before is not None)
        if before is not None and not has_slot:
            raise SetupError(
                f"the slot {slot} of the connector {name} is missing, so events were not delivered: run "
                "`outbox debezium delete`, publish what was not sent with the relay, and register again"
            )
        _refuse_relay(settings, connection)
        if wrong := cluster.validate(config):
            lines = [f"{setting}: {error}" for setting, errors in sorted(wrong.items()) for error in errors]
            raise InvalidError(name, lines)
        if before is not None and not changes and has_publication:
            return False
        done = "registered" if before is None else "replaced"
        if dry_run:
            if not has_publication:
                say(f"publication {publication}: would be made")
            if not has_slot:
                say(f"slot {slot}: would be made")
            say(f"connector {name}: would be {done}")
            return True
        with _undone(connection, cluster, name, config, before, say) as made:
            if not has_publication:
                slots.make_publication(settings, connection, publication)
                made.append("publication")
                say(f"publication {publication}: made")
            if not has_slot:
                slots.make_slot(connection, slot)
                made.append("slot")
                say(f"slot {slot}: made")
            made.append("connector")
            cluster.put(name, config)
            wait_until_read(connection, cluster, name, slot, seconds=seconds)
            say(f"connector {name}: {done}")
        return True


class InvalidError(SetupError):
    """Kafka Connect finds settings of the configuration invalid.

    Attributes:
        lines: one for each.
    """

    def __init__(self, name: str, lines: list[str]) -> None:
        super().__init__(f"Kafka Connect refuses the configuration of {name}: {'; '.join(lines)}")
        self.lines = lines


def delete(
    settings: Settings, *, slot: str, publication: str, seconds: float, dry_run: bool, say: Say
) -> bool:
    """Remove the connector, its progress, its slot and its publication; return whether there was any.

    Args:
        slot, publication: if the connector does not exist or names none.
        seconds: how long to wait for the end of its task, at most.

    Raises:
        NotReadyError: its task did not end in time; run it again.
    """
    cluster, name = Connect(settings.require_connect()), connector_name(settings)
    config = existing(cluster, name)
    slot = (config or {}).get("slot.name", slot)
    publication = (config or {}).get("publication.name", publication)
    with closing(connect(settings, name="outbox debezium delete")) as connection:
        has_slot = connection.execute(queries.SLOT, {"slot": slot}).fetchone() is not None
        if (
            settings.table_file is None
            and connection.execute(queries.FOLLOWED, {"connector": name}).fetchone()
        ):
            raise SetupError(
                f"the relay has left its slot to the connector {name}: run `outbox cutover --to cdc`, or "
                "--to polling, which remove it when the relay has continued"
            )
        if dry_run:
            if config is not None:
                say(f"connector {name}: would be removed")
            if has_slot:
                say(f"slot {slot}: would be dropped")
            return config is not None or has_slot
        if config is not None:
            remove(cluster, name, seconds=seconds)
            say(f"connector {name}: removed")
        dropped = slots.drop_slot(connection, slot, seconds=seconds)
        if dropped:
            say(f"slot {slot}: dropped")
        slots.drop_publication(connection, publication)
        return config is not None or dropped


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a text for each setting that differs; values of secrets are not shown."""
    found = []
    for key in sorted((before.keys() | after.keys()) - {"name"}):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if _SECRET.search(key):
            found.append(f"{key} differs")
        elif old is None or new is None:
            found.append(f"{key} is {'missing' if old is None else f'{old} and not wanted'}")
        else:
            found.append(f"{key} is {old} instead of {new}")
    return found


def existing(cluster: Connect, name: str) -> dict[str, str] | None:
    """Return the configuration of a connector; None if there is none."""
    try:
        return cluster.config(name)
    except MissingError:
        return None


def _refuse_relay(settings: Settings, connection: Connection) -> None:
    if settings.table_file is not None:
        return
    row = connection.execute(queries.RELAY).fetchone()
    if row is not None:
        raise SetupError(
            f"the relay {row[0]} publishes this outbox, and each event would be published twice: stop it "
            "first"
        )


@contextmanager
def _undone(
    connection: Connection,
    cluster: Connect,
    name: str,
    config: dict[str, str],
    before: dict[str, str] | None,
    say: Say,
) -> Iterator[list[str]]:
    """Undo what the block has made, if it fails; it appends the names of what it makes."""
    made: list[str] = []
    try:
        yield made
    except BaseException:
        # A call whose answer was lost may have done its work.
        try:
            if "connector" in made and before is None:
                remove(cluster, name, seconds=_CLEAN_UP_SECONDS)
            elif "connector" in made and before is not None:
                cluster.put(name, before)
                say(f"connector {name}: has its earlier configuration again")
        except OperatorError as error:
            remedy = "`outbox debezium delete`" if before is None else "this command with the earlier options"
            say(f"connector {name}: not restored ({error}). Run {remedy}")
        with suppress(OperatorError, psycopg.Error):
            if "slot" in made:
                slots.drop_slot(connection, config["slot.name"], seconds=_CLEAN_UP_SECONDS)
        with suppress(OperatorError, psycopg.Error):
            if "publication" in made:
                slots.drop_publication(connection, config["publication.name"])
        raise


def stop(cluster: Connect, name: str, *, seconds: float) -> None:
    """End a connector's task, and wait for it; nothing if there is no such connector.

    Raises:
        NotReadyError: it did not end in time.
    """
    with suppress(MissingError):
        cluster.stop(name)
        deadline = time.monotonic() + seconds
        while (status := cluster.status(name))["connector"]["state"] != "STOPPED" or status["tasks"]:
            if time.monotonic() > deadline:
                raise NotReadyError(
                    f"the connector {name} did not stop within {seconds:.0f} s: run the command again when "
                    "its worker answers"
                )
            time.sleep(_POLL)


def remove(cluster: Connect, name: str, *, seconds: float) -> None:
    """Remove a connector and its progress, from which a later one of its name would continue.

    Raises:
        NotReadyError: its task did not end in time.
    """
    stop(cluster, name, seconds=seconds)
    with suppress(MissingError):
        cluster.forget_offsets(name)
        cluster.delete(name)


def wait_until_read(
    connection: Connection, cluster: Connect, name: str, slot: str, *, seconds: float
) -> None:
    """Return when the connector runs and a session reads its slot, which is some seconds later.

    Raises:
        NotReadyError: its task has failed, or it does not read the slot in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        _wait_until_running(cluster, name, seconds=max(0.0, deadline - time.monotonic()))
        if slots.is_read(connection, slot):
            return
        if time.monotonic() > deadline:
            raise NotReadyError(
                f"the connector {name} runs, and does not read the slot {slot} after {seconds:.0f} s: see "
                "the log of its worker"
            )
        time.sleep(_POLL)


def _wait_until_running(cluster: Connect, name: str, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        status: dict[str, Any] = {}
        with suppress(MissingError):
            status = cluster.status(name)
        parts = [status.get("connector") or {}, *(status.get("tasks") or [])]
        states = [part.get("state") for part in parts]
        for part in parts:
            if part.get("state") == "FAILED":
                raise NotReadyError(
                    f"the connector {name} has failed on {part.get('worker_id')}: "
                    f"{Task(0, 'FAILED', '', part.get('trace')).reason}"
                )
        if len(parts) > 1 and set(states) == {"RUNNING"}:
            return
        if time.monotonic() > deadline:
            shown = ", ".join(str(state or "no state") for state in states)
            raise NotReadyError(f"the connector {name} does not run after {seconds:.0f} s ({shown})")
        time.sleep(_POLL)
