"""A REST catalog of Iceberg on 127.0.0.1: `RestCatalog.java`, since Maven has no server that can be run."""

from __future__ import annotations

import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psycopg

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import Server

_PROGRAM: Final = Path(__file__).with_name("RestCatalog.java")


class RestCatalog(Server):
    """The server.

    Args:
        jars: Iceberg, PostgreSQL's driver, and what these need; a name may end with `*`.
        dsn: the database of its tables.
        warehouse: where tables are that name no place.
        token: what it asks for.
    """

    name = "rest-catalog"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(self, directory: Path, jars: Sequence[Path], dsn: str, warehouse: str, token: str) -> None:
        super().__init__(directory)
        self._jars = jars
        self._dsn = psycopg.conninfo.conninfo_to_dict(dsn)
        self._warehouse = warehouse
        self._token = token

    @property
    def url(self) -> str:
        """The `uri` of the catalog for its clients."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A JRE cannot compile.
        if shutil.which("javac") is None or shutil.which("java") is None:
            raise SetupError("javac is missing: install a JDK and add it to PATH")

    def launch(self) -> None:
        at = self._dsn
        options = ["-Xmx256m", "-XX:+UseSerialGC", f"-Dorg.postgresql.pgpassfile={at['passfile']}"]
        classes = os.pathsep.join(map(str, self._jars))
        url = f"jdbc:postgresql://{at['host']}:{at['port']}/{at['dbname']}"
        given = [str(self.port), url, str(at["user"]), self._warehouse, self._token]
        with self._alone() as lock:
            self._spawn([str(shutil.which("java")), *options, "-cp", classes, _PROGRAM, *given], lock)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/v1/config", timeout=5)
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False
        return False
