"""The files that docs/architecture.md names on the way of one event are files that an event passes."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

from outbox_pipelines.relay import service
from tests.conftest import Outbox

PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def test_an_event_passes_the_files_that_the_page_names(outbox: Outbox) -> None:
    """Guards against a way that names files which no event passes any more, or too many to be read."""
    section = PAGE.read_text().partition("## The way of one event")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", section)
    assert 10 < len(named) <= 20
    passed: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            passed.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        outbox.write("42")
        assert service.relay(outbox.settings, until_empty=True).events == 1
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = [file for file in passed if "/outbox_pipelines/" in file]
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in ours)] == []
