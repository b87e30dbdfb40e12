"""A PostgreSQL and a Kafka that may be killed, and a proxy before each broker that the relays go through.

Invariants:
- A broker keeps clients of the proxies on the proxies; writers and the judge's reader connect directly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.local.server import Server, free_port
from outbox_pipelines.settings import load_settings
from tests.conftest import Lasting, quicken_logins
from tests.history.requests import KafkaProxy, Requests

# Of a cluster: one node can be away, and nothing is acknowledged that one node alone has.
_SAFE = {
    "default.replication.factor": 3,
    "min.insync.replicas": 2,
    **{
        f"{state}.replication.factor": 3
        for state in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
    },
    "transaction.state.log.min.isr": 2,
    "share.coordinator.state.topic.min.isr": 2,
}


@dataclass(frozen=True)
class Servers:
    """The database, one broker or several, and the relays' way to each of them."""

    postgres: Postgres
    brokers: tuple[Kafka, ...]
    kafka_proxies: tuple[KafkaProxy, ...]
    requests: Requests
    """All that is asked through the proxies."""

    @property
    def kafka(self) -> Kafka:
        """The first broker."""
        return self.brokers[0]

    @property
    def kafka_proxy(self) -> KafkaProxy:
        """The way to the first broker."""
        return self.kafka_proxies[0]

    @property
    def bootstrap(self) -> str:
        """All brokers, directly."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    @property
    def bootstrap_of_relays(self) -> str:
        """All brokers, through the proxies."""
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.kafka_proxies)


@contextmanager
def own_servers(directory: Path, brokers: int = 1) -> Iterator[Servers]:
    """Starts them for the length of the block; several brokers are one cluster."""
    with ExitStack() as stack:
        # With the times of commits, an event that is published before its commit is found.
        # A commit that is not to be durable stays so for long enough to be lost.
        settings = {"track_commit_timestamp": "on", "wal_writer_delay": "10s"}
        postgres = Postgres(directory / "postgres", settings, bin_dir=load_settings().local_postgres)
        stack.callback(postgres.stop)
        requests = Requests()
        doors, controllers = [[free_port() for _ in range(brokers)] for _ in range(2)]
        proxies = tuple(stack.enter_context(KafkaProxy(door, requests)) for door in doors)
        quorum = ",".join(f"{n}@127.0.0.1:{port}" for n, port in enumerate(controllers, 1))
        nodes = []
        for n, (door, controller, proxy) in enumerate(zip(doors, controllers, proxies, strict=True), 1):
            front = free_port()
            # A broker tells its clients where to go: those that come by its second door go to the proxy.
            ours = {
                "node.id": n,
                "controller.quorum.voters": quorum,
                "listeners": f"PLAINTEXT://127.0.0.1:{front},PROXIED://127.0.0.1:{door},"
                f"CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{front},PROXIED://127.0.0.1:{proxy.port}",
                "listener.security.protocol.map": ",".join(
                    f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "PROXIED", "CONTROLLER")
                ),
                "inter.broker.listener.name": "PLAINTEXT",
                "group.min.session.timeout.ms": "1000",
                # A topic that is missing is missing: `reader.create` makes those of a run.
                "auto.create.topics.enable": "false",
                **(_SAFE if brokers > 1 else {}),
            }
            node = Kafka(
                directory / f"kafka-{n}",
                ours,
                heap="384m" if brokers > 1 else "512m",
                port=front,
                jar_cache=load_settings().local_jars,
            )
            stack.callback(node.stop)
            node.prepare()
            nodes.append(node)
        _unite(nodes)
        postgres.prepare()
        for node in nodes:
            node.launch()
        postgres.start()
        quicken_logins(postgres.dsn)
        for node in nodes:
            node.wait()
        yield Servers(postgres, tuple(nodes), proxies, requests)


def _unite(nodes: list[Kafka]) -> None:
    """Each was formatted as a cluster of its own: give all of them the id of the first one's."""
    found = [(node.directory / "data" / "meta.properties") for node in nodes]
    (ours,) = re.findall(r"^cluster\.id=.*$", found[0].read_text(), re.MULTILINE)
    for path in found:
        path.write_text(re.sub(r"^cluster\.id=.*$", lambda _: ours, path.read_text(), flags=re.MULTILINE))


@contextmanager
def lasting_servers(lasting: Lasting, directories: pytest.TempPathFactory) -> Iterator[Servers]:
    """The session's, for all tests that leave the proxy healed; they run when a test begins."""
    servers: Servers = lasting.once("histories", lambda: own_servers(directories.mktemp("servers")))
    with awake(servers.postgres), awake(servers.kafka):
        yield servers


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """Let a server of the session run for a test alone: a broker costs a hundredth of a core when idle."""
    if server.running():
        server.thaw()
    else:
        server.start()
    try:
        yield
    finally:
        if server.running():
            server.freeze()
