"""The files of a release: wheel, source archive, bill of materials, licenses, notes, checksums.

Invariants:
- The same sources and time give the same bytes, in any folder.
- Nothing is uploaded, and nothing needs a network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from tests.release.bill import bill, licenses, locked

ROOT: Final = Path(__file__).parents[2]
SUMS: Final = "SHA256SUMS"
_SECTION: Final = re.compile(r"^## \[(.+?)\].*\n((?:(?!## ).*\n)*)", re.MULTILINE)


def make(root: Path, into: Path, seconds: int) -> None:
    """Make all files of the release of the sources in `root`; the folder `into` is emptied first.

    Args:
        seconds: the time of the release, since 1970: that of the files in the archives.
    """
    shutil.rmtree(into, ignore_errors=True)
    build(root, into, seconds)
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    packages = locked(root)
    (into / "sbom.cdx.json").write_text(bill(packages, version, seconds))
    (into / "licenses.txt").write_text(licenses(packages))
    (into / "release-notes.md").write_text(notes((root / "CHANGELOG.md").read_text(), version))
    sums = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(into.iterdir())
    ]
    (into / SUMS).write_text("".join(sums))


def build(root: Path, into: Path, seconds: int, *targets: str) -> None:
    """Build the wheel and the source archive, or one of these targets alone."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", into, *(f"-t{each}" for each in targets)],
        cwd=root,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(seconds)},
        check=True,
        capture_output=True,
    )


def archives(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source archive in a folder."""
    [wheel], [sources] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sources


def notes(changelog: str, version: str) -> str:
    """Return what the changelog says of a version; before it has a section of its own, what is unreleased."""
    sections = dict(_SECTION.findall(changelog))
    return f"# Outbox Pipelines {version}\n{sections.get(version) or sections['Unreleased']}".rstrip() + "\n"


def release_time(root: Path) -> int:
    """Return SOURCE_DATE_EPOCH, otherwise the time of the commit, or of an unpacked source archive."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    if (root / ".git").exists():
        command = ["git", "log", "-1", "--format=%ct"]
        return int(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    return int((root / "pyproject.toml").stat().st_mtime)
