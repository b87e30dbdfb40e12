"""A PostgreSQL and a Kafka that may be killed, and a proxy before Kafka that the relays go through.

Invariants:
- The broker keeps clients of the proxy on the proxy; writers and the judge's reader connect directly.
"""

from __future__ import annotations

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
from tests.history.proxy import Proxy


@dataclass(frozen=True)
class Servers:
    """Both, and the relays' way to Kafka."""

    postgres: Postgres
    kafka: Kafka
    kafka_proxy: Proxy


@contextmanager
def own_servers(directory: Path) -> Iterator[Servers]:
    """Starts them for the length of the block."""
    with ExitStack() as stack:
        # With the times of commits, an event that is published before its commit is found.
        keeps_times = {"track_commit_timestamp": "on"}
        postgres = Postgres(directory / "postgres", keeps_times, bin_dir=load_settings().local_postgres)
        # A broker tells its clients where to go: those that come by its second door are sent to the proxy.
        front, door, controller = free_port(), free_port(), free_port()
        kafka_proxy = stack.enter_context(Proxy(door))
        kafka = Kafka(
            directory / "kafka",
            {
                "controller.quorum.voters": f"1@127.0.0.1:{controller}",
                "listeners": f"PLAINTEXT://127.0.0.1:{front},PROXIED://127.0.0.1:{door},"
                f"CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{front},"
                f"PROXIED://127.0.0.1:{kafka_proxy.port}",
                "listener.security.protocol.map": ",".join(
                    f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "PROXIED", "CONTROLLER")
                ),
                "inter.broker.listener.name": "PLAINTEXT",
                "group.min.session.timeout.ms": "1000",
                # A topic that is missing is missing: `reader.create` makes those of a run.
                "auto.create.topics.enable": "false",
            },
            port=front,
            jar_cache=load_settings().local_jars,
        )
        stack.callback(postgres.stop)
        stack.callback(kafka.stop)
        kafka.prepare()
        postgres.prepare()
        kafka.launch()
        postgres.start()
        quicken_logins(postgres.dsn)
        kafka.wait()
        yield Servers(postgres, kafka, kafka_proxy)


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
