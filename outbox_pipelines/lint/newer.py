"""Recognize a syntax that is newer than the running Python, which alone could parse it."""

from __future__ import annotations

import re
import sys
from typing import Final

# The version that has it first, and how a line shows it.
_SYNTAX: Final = (
    ((3, 12), re.compile(rb"\s*type\s+\w+\s*(\[.*\])?\s*=")),
    ((3, 12), re.compile(rb"\s*(async\s+)?(def|class)\s+\w+\s*\[")),
    ((3, 12), re.compile(rb"""(^|.*\W)(f|rf|fr)("|\')""", re.IGNORECASE)),
    ((3, 14), re.compile(rb"""(^|.*\W)(t|rt|tr)("|\')""", re.IGNORECASE)),
    ((3, 14), re.compile(rb"\s*except\*?\s+[\w.]+\s*,")),
    ((3, 15), re.compile(rb"\s*lazy\s+(import|from)\s")),
)


def newer(source: bytes, line: int) -> str:
    """Return what to add to the message of a syntax error: whether a newer Python may read the line."""
    running = sys.version_info[:2]
    lines = source.splitlines()[line - 1 : line]
    found = {version for version, syntax in _SYNTAX for text in lines if syntax.match(text)}
    if not found or max(found) <= running:
        return ""
    version = ".".join(map(str, min(one for one in found if one > running)))
    return (
        f"; it may be the syntax of Python {version} or newer, and this is Python "
        f"{'.'.join(map(str, running))}: run outbox lint-writes with the Python of the application"
    )
