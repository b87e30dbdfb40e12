"""Select the files to read, and recognize a syntax that is newer than the running Python.

Invariants:
- Named files and directories are read, whatever their name or place, unless `exclude` matches them.
- Inside a directory, hidden directories and installed or built files are excluded; links to directories
  are not followed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError

_INSTALLED: Final = {"node_modules", "site-packages", "__pycache__", "__pypackages__"}
# The version that has it first, and how a line shows it.
_SYNTAX: Final = (
    ((3, 12), re.compile(rb"\s*type\s+\w+\s*(\[.*\])?\s*=")),
    ((3, 12), re.compile(rb"\s*(async\s+)?(def|class)\s+\w+\s*\[")),
    ((3, 12), re.compile(rb"""(^|.*\W)(f|rf|fr)("|\')""", re.IGNORECASE)),
    ((3, 14), re.compile(rb"""(^|.*\W)(t|rt|tr)("|\')""", re.IGNORECASE)),
    ((3, 14), re.compile(rb"\s*except\*?\s+[\w.]+\s*,")),
    ((3, 15), re.compile(rb"\s*lazy\s+(import|from)\s")),
)


def python_files(paths: Iterable[Path], exclude: Sequence[str] = ()) -> list[Path]:
    """Return the Python files under the paths, each once, in a stable order.

    Args:
        exclude: patterns of names, or of paths, of files and directories to leave out.

    Raises:
        SetupError: a path does not exist, or contains no Python file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise SetupError(f"{path} does not exist: name files or directories of your application")
        under = _under(path, exclude) if path.is_dir() else [path]
        found.update(dict.fromkeys(one for one in under if not _matches(one, exclude)))
    if not found:
        raise SetupError("no Python files found: name files or directories of your application")
    return list(found)


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    texts = (path.name, path.as_posix())
    return any(fnmatchcase(text, pattern.rstrip("/")) for text in texts for pattern in patterns)


def _under(root: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for directory, inner, names in os.walk(root):
        place = Path(directory)
        inner[:] = sorted(
            name for name in inner if not (_left_out(place / name) or _matches(place / name, exclude))
        )
        yield from (place / name for name in sorted(names) if _is_python(place / name))


def _is_python(path: Path) -> bool:
    # Editors leave broken links behind.
    return path.suffix == ".py" and path.is_file()


def _left_out(directory: Path) -> bool:
    name = directory.name
    return name.startswith(".") or name in _INSTALLED or (directory / "pyvenv.cfg").exists()


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
