"""Files that a person names, and files of stores of objects: complete or absent, also after a crash.

Invariants:
- A file that is replaced gets its name only when it is complete. What is no regular file is never replaced.
- The errors of a store are one line, without secrets.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from outbox_pipelines.core.secret import first_line, redacted
from outbox_pipelines.errors import SetupError

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


def require_replaceable(path: Path) -> Path:
    """Return the file that a path names, behind its symbolic links.

    Raises:
        SetupError: it is no regular file, or its directory is missing or cannot be written.
    """
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                raise SetupError(f"{path} cannot be written: it is no regular file: name another one")
        file = Path(os.path.realpath(path)) if path.is_symlink() else path
        # Also of a path that leads through a file.
        file.parent.stat()
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}: name another file") from None
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise SetupError(
            f"{path} cannot be written: change the rights of {file.parent}, or name another file"
        )
    return file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provide the name of a file beside this one, which it replaces at the end.

    Raises:
        SetupError: the file cannot be written.
    """
    path = require_replaceable(path)
    try:
        # A name that others can foresee could be a link that they have planted.
        with TemporaryDirectory(prefix=f".{path.name[:100]}.", dir=path.parent) as beside:
            begun = Path(beside) / "begun"
            yield begun
            begun.replace(path)
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {first_line(error)}: name another file") from None
