"""The cells of `make matrix`: one for each version of Python, and one for each version of PostgreSQL.

Invariants:
- A version is looked for where it is usually installed; nothing is downloaded to find one.
- Not every pair is a cell: each Python runs with the default PostgreSQL, each PostgreSQL with this Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.postgres import SYSTEM, find_programs, major_version

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
POSTGRES: Final = ("14", "15", "16", "17", "18")


@dataclass(frozen=True)
class Cell:
    """One run of the tests, or why it is skipped."""

    name: str
    python: Path | None = None
    postgres: Path | None = None
    """Directory of PostgreSQL's programs; None for the default."""
    skipped: str = ""


def cells(pythons: Mapping[str, Path], postgres: Mapping[str, Path], here: Path) -> list[Cell]:
    """Return all cells; those whose version is missing say so.

    Args:
        here: the interpreter that runs the PostgreSQL cells.
    """
    found = [
        Cell(f"python{version}", pythons[version])
        if version in pythons
        else Cell(f"python{version}", skipped=f"no python{version} on PATH or in ~/.pyenv/versions")
        for version in PYTHONS
    ]
    found += [
        Cell(f"postgresql{version}", here, postgres[version])
        if version in postgres
        else Cell(
            f"postgresql{version}", skipped=f"no programs in {SYSTEM}/{version}/bin or the Python package"
        )
        for version in POSTGRES
    ]
    return found


def find_pythons() -> dict[str, Path]:
    """Return the interpreters that are installed and run, by version."""
    installed = Path.home() / ".pyenv" / "versions"
    found = {}
    for version in PYTHONS:
        on_path = shutil.which(f"python{version}")
        candidates = [Path(on_path)] if on_path else []
        candidates += sorted(installed.glob(f"{version}.*/bin/python{version}"), reverse=True)
        if _version(Path(sys.executable)) == version:
            candidates.insert(0, Path(sys.executable))
        runs = next((each for each in candidates if _version(each) == version), None)
        if runs is not None:
            found[version] = runs
    return found


def _version(python: Path) -> str:
    # pyenv puts commands on PATH that only say which versions exist.
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def find_postgres() -> dict[str, Path]:
    """Return the directories of PostgreSQL's programs, by major version; the Python package's come first."""
    folders = [*SYSTEM.glob("*/bin")]
    with suppress(SetupError):
        folders += find_programs().parents[1].glob("pginstall*/bin")
    return {major_version(each): each for each in folders if (each / "initdb").is_file()}
