"""The user that PostgreSQL runs as: the caller, or `nobody` if the caller is root, which PostgreSQL rejects.

Invariants:
- No existing folder is opened to other users. Programs that `nobody` cannot reach are copied to a place that
  root owns; data is reached through an inherited open directory instead of its path.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COPIES = Path("/var/cache/outbox-pipelines")

STAY = (-1, -1)


def identity() -> tuple[int, int]:
    """Ids of the user and the group to change to; `STAY` where no change is needed."""
    if os.geteuid() != 0:
        return STAY
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


@contextmanager
def reachable(directory: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """A path by which that user's programs reach a directory, and the descriptors they must inherit."""
    if identity() == STAY:
        yield directory, ()
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The kernel follows this link without asking for leave to pass the folders above.
        yield Path(f"/proc/self/fd/{descriptor}"), (descriptor,)
    finally:
        os.close(descriptor)


def own(directory: Path) -> None:
    """Give an empty directory to that user, closed to all others."""
    directory.chmod(0o700)
    if identity() != STAY:
        os.chown(directory, *identity())


def programs(bin_dir: Path) -> Path:
    """The same programs where that user can run them; `bin_dir` itself where it can."""
    if identity() == STAY or _anyone_may_enter(bin_dir):
        return bin_dir
    tree = bin_dir.parent
    # A changed installation is another one.
    key = f"{tree} {(bin_dir / 'postgres').stat().st_mtime_ns}"
    target = COPIES / hashlib.sha256(key.encode()).hexdigest()[:12]
    if not target.is_dir():
        COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=COPIES) as work:
            _copy(tree, Path(work) / "copy")
            try:
                (Path(work) / "copy").rename(target)
            except OSError:
                # Another process was faster; its copy is as good.
                if not target.is_dir():
                    raise
    return target / tree.parent.name / tree.name / bin_dir.name


def _copy(tree: Path, target: Path) -> None:
    package = tree.parent
    shutil.copytree(tree, target / package.name / tree.name, symlinks=True)
    # A wheel keeps its libraries beside its package, and its programs look for them there.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            enter = 0o111 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0
            path.chmod(path.stat().st_mode | 0o444 | enter)


def _anyone_may_enter(directory: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (directory, *directory.parents))
