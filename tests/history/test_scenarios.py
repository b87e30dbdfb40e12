"""Two histories of `exactly_once` that were wrong once, made by hand: they are found every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.history import business
from tests.history.__main__ import report
from tests.history.load import Load
from tests.history.relays import RELAYS
from tests.history.run import Run
from tests.history.servers import Servers
from tests.history.watched import Order

# Nothing is to time out on a busy machine.
_PATIENT = {"OUTBOX_TRANSACTION_SECONDS": "30", "OUTBOX_BATCH_EVENTS": "20000"}


@contextmanager
def _run(servers: Servers, directory: Path, load: Load) -> Iterator[Run]:
    run = Run(servers, "exactly_once", RELAYS["exactly_once"], 1, directory, load=load, patience=20)
    try:
        yield run
    finally:
        run.close()


def test_a_full_transaction_whose_commit_answers_late(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards G1: what comes while a commit waits for its answer is refused by the client: it was not sent."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    # Whenever the first transaction ends, the batch after it makes one that is full.
    with _run(servers, tmp_path, Load(environment=_PATIENT, writers=False)) as run:
        run.pile_up(60_000)
        run.start_relay(run.relays[0], Order("commit", "lost"))
        verdict = report(run.finish())
        assert "! lost commit" in run.steps_of(run.relays[0])
    assert verdict.wrong == []
    assert verdict.committed == 60_000


def test_a_crash_when_the_next_tick_is_open_and_released_events_are_still_parked(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards G5: Kafka's record of what was released counts until the database has it too."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    with _run(servers, tmp_path, Load()) as run:
        run.limit_topics(30_000)
        with psycopg.connect(run.dsn) as connection:
            business.count(connection, "order", 30, 40_000)
            for _ in range(20):
                business.count(connection, "order", 30)
        # The session's next statement opens the tick, with the released events still to be removed.
        for writer in run.writers:
            writer.start()
        run.start_relay(run.relays[0], Order("commit", "hold", released=True, then="open a tick"))
        assert run.wait(60, lambda: run.count("SELECT count(*) FROM outbox_parked") == 21)
        run.limit_topics(None)
        run.replay()
        assert run.wait(60, lambda: "! after open a tick" in run.steps_of(run.relays[0]))
        verdict = report(run.finish())
    assert verdict.wrong == []
