"""The model is judged: each deliberate break of the core is found."""

from __future__ import annotations

import pytest

from tests.model.marked.breaks import BREAKS, found


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a model that sees nothing."""
    result = found(BREAKS[name], monkeypatch.setattr)
    assert result.broken is not None, f"{result.states} states, and nothing is wrong"
