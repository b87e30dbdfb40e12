"""The relay of an existing table, judged by whole runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.history import nemesis
from tests.history.__main__ import report
from tests.history.relays import RELAYS
from tests.history.run import Run
from tests.history.servers import Servers

_FAULTS, _FEW_FAULTS = 6, 3


@pytest.mark.thorough
def test_some_kinds_of_fault(servers: Servers, seed: int, tmp_path: Path, is_thorough: bool) -> None:
    """Guards G1, G2 and G5 for rows that are claimed and marked, against what chance brings."""
    chance = random.Random(seed)
    run = Run(servers, "table", RELAYS["table"], seed, tmp_path)
    try:
        run.start()
        for name in chance.sample(list(nemesis.KINDS), _FAULTS if is_thorough else _FEW_FAULTS):
            print(f"{run.arrived:8}  {name}")
            run.disturb({name: nemesis.KINDS[name]}, chance, chance.uniform(0.1, 3))
        verdict = report(run.finish())
    finally:
        run.close()
    assert verdict.wrong == []
