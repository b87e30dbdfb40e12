"""A Redis of its own on a free port, which keeps nothing on disk; for benchmarks and tests."""

from __future__ import annotations

import shutil
import signal

import redis

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import Server

PROGRAM = shutil.which("redis-server")


class RedisServer(Server):
    """Debian's redis-server; `start` it first."""

    name = "redis"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """As most clients would make one."""
        return redis.Redis.from_url(self.url)

    def prepare(self) -> None:
        if PROGRAM is None:
            raise SetupError("redis-server was not found: apt-get install redis-server")
        self.directory.mkdir(parents=True, exist_ok=True)

    def launch(self) -> None:
        assert PROGRAM is not None, "prepare() comes first"
        where = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory)]
        with self._alone() as lock:
            self._spawn([PROGRAM, *where, "--save", "", "--appendonly", "no"], lock)

    def answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1, retry=None) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False
