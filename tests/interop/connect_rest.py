"""What an operator of Kafka Connect does with a connector: by its REST, and the slot by SQL.

The statements and calls are those of docs/debezium-on-connect.md.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from tests.conftest import wait_until

_PASSING = (404, 409, 500)


class ConnectRest:
    """The REST of a cluster; each call is sent to the first worker that answers."""

    def __init__(self, urls: str) -> None:
        self._urls = urls.split(",")

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send a call; return the answer, or raise `HTTPError`."""
        sent = None if body is None else json.dumps(body).encode()
        refused: OSError | None = None
        for url in self._urls:
            request = urllib.request.Request(
                f"{url}{path}", sent, {"Content-Type": "application/json"}, method=method
            )
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError:
                raise
            except OSError as error:
                refused = error
        assert refused is not None
        raise refused

    def settled(self, method: str, path: str, body: object = None) -> None:
        """Send a call again until the cluster, which rebalances, takes it."""

        def taken() -> bool:
            try:
                self.call(method, path, body)
            except urllib.error.HTTPError as error:
                if error.code not in _PASSING:
                    raise
                return False
            return True

        wait_until(taken, seconds=60, what=f"{method} {path}")

    def status(self, name: str) -> Any:
        """Return the state of a connector and its tasks."""
        return self.call("GET", f"/connectors/{name}/status")

    def put(self, name: str, config: dict[str, str]) -> None:
        """Make a connector, and wait until its task runs."""
        self.settled("PUT", f"/connectors/{name}/config", config)
        wait_until(lambda: self._states(name) == ["RUNNING", "RUNNING"], seconds=60, what=f"{name} runs")

    def stop(self, name: str) -> None:
        """End the task of a connector, and wait for it."""
        self.settled("PUT", f"/connectors/{name}/stop")
        wait_until(lambda: self._states(name) == ["STOPPED"], seconds=60, what=f"{name} is stopped")

    def resume(self, name: str) -> None:
        """Let a connector that was paused or stopped continue."""
        self.settled("PUT", f"/connectors/{name}/resume")

    def remove(self, name: str) -> None:
        """Remove a connector with its offsets, if there is one."""
        with suppress(urllib.error.HTTPError):
            self.status(name)
            self.stop(name)
            self.forget_offsets(name)
            self.settled("DELETE", f"/connectors/{name}")

    def forget_offsets(self, name: str) -> None:
        """Remove the progress of a stopped connector."""
        self.settled("DELETE", f"/connectors/{name}/offsets")

    def _states(self, name: str) -> list[str]:
        try:
            found = self.status(name)
        except urllib.error.HTTPError:
            return []
        return [found["connector"]["state"], *(task["state"] for task in found["tasks"])]


def make_slot(dsn: str, name: str, table: tuple[str, ...]) -> None:
    """Make publication and slot of this name."""
    made = sql.SQL(
        "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert', publish_via_partition_root = true)"
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(made.format(sql.Identifier(name), sql.Identifier(*table)))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])


def drop_slot(dsn: str, name: str) -> None:
    """Drop both, if they exist, when no session reads the slot."""
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_until(
            lambda: connection.execute(query, [name]).fetchone() != (True,),
            seconds=60,
            what="a slot that no session reads",
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            [name],
        )
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
