"""Copies of settings in tests and commands."""

from __future__ import annotations

import pytest

from outbox_pipelines.settings import load_settings


def test_a_name_that_is_no_setting_is_refused() -> None:
    """Guards against a copy in which a misspelled setting has no effect."""
    with pytest.raises(TypeError, match="no settings: batch_event"):
        load_settings().model_copy(update={"batch_event": 1})
