"""The core of a marked table's relay in small worlds: all states, a fault at every call, random histories."""

from __future__ import annotations

import pytest

from tests.model.marked.scopes import SCOPES

SMALL = [name for name, scope in SCOPES.items() if scope.is_small]


@pytest.mark.parametrize("name", SMALL)
def test_every_state(name: str) -> None:
    """Guards G1, G2, G4 and G5 in every state, and that everything is published in the end."""
    result = SCOPES[name].explored()
    assert result.broken is None, SCOPES[name].told(result)
    assert not result.missing
    bound = SCOPES[name].states
    assert result.exhausted or (bound and result.states >= bound)


def test_random_histories() -> None:
    """Guards the same where there are too many states."""
    runs = SCOPES["marked-random"].at_random(seeds=60)
    assert runs.broken is None, SCOPES["marked-random"].told(runs)
    assert runs.histories == 60
