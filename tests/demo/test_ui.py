"""`make ui`: the relay at work in Dagster's pages, and nothing left of it afterwards."""

from __future__ import annotations

import signal
import socket
import urllib.request
from pathlib import Path

import psycopg

from outbox_pipelines.local.server import free_port
from tests.conftest import wait_until
from tests.demo.processes import demo

PUBLISHED = "SELECT coalesce(sum(events), 0) FROM outbox_ui.outbox_progress"


def test_shows_the_relay_live_and_leaves_nothing(database: dict[str, str], directory: Path) -> None:
    port = free_port()
    with demo(directory, database, "ui", "--port", str(port)) as ui:
        wait_until(lambda: ui.told("Ctrl-C"), seconds=120, what="the address")
        assert f"http://127.0.0.1:{port}" in ui.output
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info") as answer:
            assert answer.status == 200
        with psycopg.connect(database["OUTBOX_DSN"], autocommit=True) as connection:

            def published() -> int:
                row = connection.execute(PUBLISHED).fetchone()
                return int(row[0]) if row else 0

            # Days that are over, for what the pages do with days.
            past = connection.execute(
                "SELECT count(DISTINCT (created_at AT TIME ZONE 'UTC')::date) FROM outbox_ui.outbox"
            ).fetchone()
            assert past is not None
            assert past[0] >= 5

            # The supervisor's sensor has started a session automatically.
            before = published()
            wait_until(lambda: published() > before, seconds=90, what="a published event")
        assert len(ui.descendants()) > 3
        ui.process.send_signal(signal.SIGTERM)
        assert ui.process.wait(600) == 0, ui.output
        assert ui.descendants() == []
        assert list(directory.iterdir()) == []
    with psycopg.connect(database["OUTBOX_DSN"]) as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname = 'outbox_ui'").fetchone() is None


def test_a_port_in_use_is_one_line(database: dict[str, str], directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with demo(directory, database, "ui", "--port", str(port)) as ui:
            assert ui.process.wait(600) == 2
            assert ui.output == f"demo: port {port} is in use: choose another with --port\n"
