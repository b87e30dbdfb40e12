"""Select the files to read.

Invariants:
- Named files and directories are always read, whatever their name or place.
- Inside a directory, hidden directories and installed or built files are excluded; links to directories
  are not followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError

_INSTALLED: Final = {"node_modules", "site-packages", "__pycache__", "__pypackages__"}


def python_files(paths: Iterable[Path]) -> list[Path]:
    """Return the Python files under the paths, each once, in a stable order.

    Raises:
        SetupError: a path does not exist, or contains no Python file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise SetupError(f"{path} does not exist: name files or directories of your application")
        found.update(dict.fromkeys(_under(path) if path.is_dir() else [path]))
    if not found:
        raise SetupError("no Python files found: name files or directories of your application")
    return list(found)


def _under(root: Path) -> Iterator[Path]:
    for directory, inner, names in os.walk(root):
        place = Path(directory)
        inner[:] = sorted(name for name in inner if not _left_out(place / name))
        yield from (place / name for name in sorted(names) if _is_python(place / name))


def _is_python(path: Path) -> bool:
    # Editors leave broken links behind.
    return path.suffix == ".py" and path.is_file()


def _left_out(directory: Path) -> bool:
    name = directory.name
    return name.startswith(".") or name in _INSTALLED or (directory / "pyvenv.cfg").exists()
