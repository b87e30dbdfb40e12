"""Relays in exactly_once that a late commit undoes, made by hand: the judge finds them, every time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.conftest import wait_until
from tests.history import broken, business
from tests.history.__main__ import report
from tests.history.judge import Verdict
from tests.history.load import Load
from tests.history.relays import RELAYS
from tests.history.requests import ABORT, COMMIT, Late
from tests.history.run import Run
from tests.history.servers import Servers


@pytest.fixture
def run(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """With one event of an account, and then another one; no process runs."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    run = Run(
        servers,
        "broken.keeps_producer",
        RELAYS["broken.keeps_producer"],
        1,
        tmp_path,
        load=Load(writers=False),
        patience=2,
    )
    try:
        yield run
    finally:
        servers.requests.heal()
        run.close()


def _count(run: Run) -> None:
    with psycopg.connect(run.dsn) as connection:
        business.count(connection, "order", 1)


def _hold_a_commit(run: Run, relay: broken.KeepsProducer) -> None:
    """Publishes an event; the transaction is committed by the second of two requests, the first is held."""
    requests = run.servers.requests
    late = Late(COMMIT, moments=(ABORT,))
    requests.delay(late)
    _count(run)
    wait_until(relay.step, what="the transaction of the event")
    assert late.is_held
    assert run.wait(30, lambda: run.arrived == 1)
    _count(run)


def _end_and_judge(run: Run, relay: broken.KeepsProducer) -> Verdict:
    """The relay dies; its successor goes on."""
    relay.close()
    successor = type(relay)(run.settings)
    while successor.step():
        pass
    successor.close()
    return report(run.finish())


def _next(relay: broken.KeepsProducer) -> list[broken.Row]:
    wait_until(relay.read, what="the horizon to pass the event")
    return relay.read()


def test_a_producer_that_is_kept_duplicates(run: Run) -> None:
    """Guards G5: the commit of one transaction makes visible what the next one has so far."""
    relay = broken.KeepsProducer(run.settings)
    _hold_a_commit(run, relay)
    rows = _next(relay)
    relay.begin()
    relay.publish(rows)
    relay.flush()
    run.servers.requests.heal()
    assert run.wait(30, lambda: run.arrived == 2)
    assert _end_and_judge(run, relay).wrong[0] == "duplicate (1): order/1/2"


def test_a_record_before_its_events_loses_them(run: Run) -> None:
    """Guards G1: the record is visible, and the events of its transaction never come."""
    relay = broken.RecordsFirst(run.settings)
    _hold_a_commit(run, relay)
    rows = _next(relay)
    relay.begin()
    relay.record(rows)
    relay.flush()
    run.servers.requests.heal()
    wait_until(lambda: relay.recorded() == rows[0].seq, what="the record")
    assert _end_and_judge(run, relay).wrong[0] == "lost write (1): order/1/2"


def test_without_a_late_commit_both_are_right(run: Run) -> None:
    """Guards against a harness that finds fault with any such relay."""
    for kind in (broken.KeepsProducer, broken.RecordsFirst):
        relay = kind(run.settings)
        _count(run)
        wait_until(relay.step, what="the transaction of the event")
        relay.close()
    verdict = report(run.finish())
    assert verdict.wrong == []
    assert verdict.committed == 2
