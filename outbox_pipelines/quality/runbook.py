"""The chapters of the page Operating, which the package contains: what to do when a check fails."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]
# In a checkout the page is where the other pages are.
_PLACES: Final = (_PACKAGE / "operating.md", _PACKAGE.parent / "docs" / "operating.md")
_LINK: Final = re.compile(r"\[([^\]]+)\]\((#?[^)]*)\)")


def chapter_text(name: str) -> str:
    """Return a check's chapter as Markdown; empty if there is none."""
    return _chapters().get(name, "")


@cache
def _chapters() -> dict[str, str]:
    page = next((place for place in _PLACES if place.is_file()), None)
    if page is None:
        return {}
    found = {}
    for section in re.split(r"^#{2,3} ", page.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        # Links of the page lead nowhere without it.
        found[title.strip()] = _LINK.sub(_words, text).strip()
    return found


def _words(link: re.Match[str]) -> str:
    text, address = link.groups()
    return link[0] if address.startswith("https://") else text
