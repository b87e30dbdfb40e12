"""Replace a file that a person names.

Invariants:
- A file gets its name only when it is complete. What is no regular file is never replaced.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import SetupError


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
