"""The relay's core in small worlds: all states, a fault at every call, random histories of larger worlds."""

from __future__ import annotations

import pytest

from tests.model import explore
from tests.model.relay.scopes import SCOPES

_MOST = 5_000
# Where some of what must be seen is further away.
_MORE = {"once-parked": 7_000, "once-refused": 7_000, "once-shards": 7_000}
SMALL = [name for name, scope in SCOPES.items() if scope.is_small]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SMALL)
def test_every_state(name: str, is_thorough: bool) -> None:
    """Guards G1, G2, G4 and G5 in every state, and that everything is published in the end."""
    scope = SCOPES[name]
    # Those nearest to the beginning: most breaks of `test_breaks` are found within 2,000.
    bound = scope.states if is_thorough else scope.states and min(scope.states, _MORE.get(name, _MOST))
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


@pytest.mark.parametrize("name", ["relay", "once"])
def test_many_states_wait_in_little_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a long exploration that ends with an error: a part of the core cannot be packed."""
    monkeypatch.setattr(explore, "MOST_UNPACKED", 0)
    assert SCOPES[name].explored(states=300).broken is None
