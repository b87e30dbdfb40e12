"""docs/settings.md is what `python docs/settings_page.py` makes of the settings."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_of_the_settings() -> None:
    """Guards against a page that shows other defaults, and a setting that is not documented."""
    names = runpy.run_path(str(DOCS / "settings_page.py"))
    assert names["PAGE"].read_text() == names["page"](), "run `.venv/bin/python docs/settings_page.py`"
