"""The table of durable steps compared with what relays do: none may be missing in either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.history import life, steps
from tests.history.__main__ import report
from tests.history.load import Load
from tests.history.relays import RELAYS
from tests.history.run import Run
from tests.history.servers import Servers


@pytest.mark.parametrize("mode", steps.MODES)
def test_a_life_has_every_step_of_the_table_and_no_other(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: steps.Mode
) -> None:
    """Guards against a durable step that no fault is ever placed at, and a life that loses events."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    load = Load(environment={"OUTBOX_BREAKER_SECONDS": "1"}, writers=False)
    run = Run(servers, mode, RELAYS[mode], 1, tmp_path, load=load, missing=life.MISSING, patience=30)
    try:
        life.live(run)
        verdict = report(run.finish())
        done = {step for relay in run.relays for step in run.steps_of(relay) if not step.startswith("!")}
        asked = set(run.steps_of_commands())
    finally:
        run.close()
    assert verdict.wrong == []
    # One life begins in the other mode.
    assert done - set(steps.STEPS) == set()
    missing = set(steps.of(mode)) - done
    assert {name for name in missing if not steps.STEPS[name].rare} == set()
    assert asked == set(steps.of(mode, command=True))
