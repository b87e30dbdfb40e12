"""`make demo-archive`: what it claims, a claim that does not hold, and nothing left at its end."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest

from examples.airline import archive, queries
from tests.conftest import wait_until
from tests.demo.processes import demo
from tests.kafka_clients import AdminClient

pytestmark = [pytest.mark.slow, pytest.mark.extended]

MADE = """
SELECT datname FROM pg_database WHERE datname LIKE 'outbox_archive_%_' || current_database()
UNION ALL SELECT nspname FROM pg_namespace WHERE nspname = 'outbox_archive'"""


def _made(database: dict[str, str], topics: str = "") -> set[str]:
    """What a demo has made on the servers, and which of these topics there are."""
    there = AdminClient({"bootstrap.servers": database["OUTBOX_KAFKA"]}).list_topics(timeout=60).topics
    with psycopg.connect(database["OUTBOX_DSN"]) as connection:
        return {name for (name,) in connection.execute(MADE)} | {*topics.split(", ")} & {*there}


def test_all_is_proven(database: dict[str, str], directory: Path) -> None:
    """Guards against a demo that proves less than it shows. Not with Spark."""
    with demo(directory, {**database, "OUTBOX_LOCAL_DIR": str(directory / "none")}, "archive") as process:
        assert process.process.wait(600) == 0, process.output
        for claim in (
            "the board shows what was written: 10,0",
            "the new board equals the first one, row by row: ",
            "consumer: ",
            "replay: ERASED for this passenger alone",
            "archive: NULL for this passenger alone",
            "DuckDB answers as",
        ):
            assert f"proven: {claim}" in process.output
        assert process.output.count("outbox-erased") == 1
        assert process.descendants() == []
        assert list(directory.iterdir()) == []
    assert _made(database) == set()


def test_ctrl_c_leaves_nothing(database: dict[str, str], directory: Path) -> None:
    with demo(directory, database, "archive") as process:
        wait_until(lambda: process.told("3. Passenger"), seconds=120, what="the replay")
        with psycopg.connect(database["OUTBOX_DSN"]) as connection:
            [(comment,)] = connection.execute(queries.COMMENT, ["outbox_archive"])
        topics = comment.partition("Topics: ")[2]
        assert len(_made(database, topics)) == 4 + 3
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(600) == 130, process.output
        assert process.descendants() == []
        assert list(directory.iterdir()) == []
    wait_until(lambda: not _made(database, topics), what="the end of what it made")


def test_boards_that_differ_fail_it(
    database: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a demo that succeeds whatever it finds: here, a mistaken consumer."""
    for name, value in database.items():
        monkeypatch.setenv(name, value)
    mistaken = queries.SHOW_ON_BOARD.replace("%(name)s", "replace(%(name)s, 'Ada', 'Eva')")
    monkeypatch.setattr(queries, "SHOW_ON_BOARD", mistaken)
    assert archive.run(seed=1) == 1
    assert "NOT PROVEN: the board shows what was written" in capsys.readouterr().out
