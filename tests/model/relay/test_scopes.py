"""The relay's core in small worlds: all states, a fault at every call, random histories of larger worlds."""

from __future__ import annotations

import pytest

from tests.model.relay.scopes import SCOPES

_MOST = 8_000
SMALL = [name for name, scope in SCOPES.items() if scope.is_small]


@pytest.mark.parametrize("name", SMALL)
def test_every_state(name: str) -> None:
    """Guards G1, G2, G4 and G5 in every state, and that everything is published in the end."""
    scope = SCOPES[name]
    # Those nearest to the beginning; `make model` explores all.
    bound = scope.states and min(scope.states, _MOST)
    result = scope.explored(states=bound)
    assert result.broken is None, scope.told(result)
    assert not result.missing
    assert result.exhausted or result.states >= (bound or 0)


@pytest.mark.parametrize("name", [name for name, scope in SCOPES.items() if scope.seeds])
def test_random_histories(name: str) -> None:
    """Guards the same where there are too many states."""
    runs = SCOPES[name].at_random(seeds=60)
    assert runs.broken is None, SCOPES[name].told(runs)
    assert runs.histories == 60
