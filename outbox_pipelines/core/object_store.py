"""What stores of objects have in common: files that survive a crash, and errors without secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from outbox_pipelines.core.secret import first_line, redacted

# A bucket's error message is XML, after the request.
_ANSWER: Final = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
# It can have a signature.
_QUERY: Final = re.compile(r"\?[^\s\"')]*")
_LONGEST: Final = 300


def reason(error: Exception) -> str:
    """Return what a store reports, in one line, without credentials and the query of a URL."""
    answer = _ANSWER.search(str(error))
    text = redacted(answer.group(1)) if answer else first_line(error)
    return _QUERY.sub("", text)[:_LONGEST]


def sync(path: Path) -> None:
    """Write a file or a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
