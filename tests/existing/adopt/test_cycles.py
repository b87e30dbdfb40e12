"""Nothing is lost, invented, reordered or, in exactly_once, duplicated by switches there and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.local import Stack
from tests.existing.adopt.cycles import cycles
from tests.history.record import Delivery
from tests.history.verify import seed as drawn


@pytest.mark.extended
@pytest.mark.thorough
@pytest.mark.parametrize(
    "delivery", [pytest.param("at_least_once", marks=pytest.mark.thorough(only=True)), "exactly_once"]
)
def test_there_and_back_under_load(
    stack: Stack, tmp_path: Path, delivery: Delivery, is_thorough: bool
) -> None:
    """Guards G1, G2 and G5 across `switch` and `back`, against what chance brings."""
    with cycles(stack, drawn(), tmp_path, delivery) as run:
        for _ in range(3 if is_thorough else 1):
            run.cycle()
        verdict = run.finish()
    assert verdict.wrong == []
    assert verdict.committed > 100
