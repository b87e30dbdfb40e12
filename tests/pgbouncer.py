"""A pgbouncer before a database, for tests; where it is not installed, they are skipped, in CI they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.local.server import free_port
from tests import forks
from tests.conftest import password_of, patience, wait_until

_PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def pgbouncer(dsn: str, folder: Path, **settings: object) -> Iterator[str]:
    """Runs one with these settings; the DSN that leads through it."""
    if _PROGRAM is None and os.environ.get("CI") != "true":
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    assert _PROGRAM is not None
    server, port = psycopg.conninfo.conninfo_to_dict(dsn), free_port()
    given = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pidfile": "",
        **settings,
    }
    if os.geteuid() == 0:
        given["user"] = "nobody"
    lines = [
        "[databases]",
        f"* = host={server['host']} port={server['port']} user=postgres password={password_of(dsn)}",
        "[pgbouncer]",
        *(f"{name} = {value}" for name, value in given.items()),
    ]
    config = folder / f"{port}.ini"
    config.write_text("\n".join(lines))
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process: forks.Popen[bytes] = forks.Popen([_PROGRAM, "-q", str(config)], env=os.environ, **quiet)
    behind = psycopg.conninfo.make_conninfo(dsn, port=port)

    def answers() -> bool:
        assert process.poll() is None, "pgbouncer has ended"
        try:
            psycopg.connect(behind, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        wait_until(answers, what="pgbouncer to answer")
        yield behind
    finally:
        process.kill()
        process.wait(patience(10))
