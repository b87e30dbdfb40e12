"""Where a run keeps its files: in memory where there is enough of it, otherwise on the disk as usual.

A test's database is nearly a thousand small files, and a suite makes thousands of databases: on a disk the
file system takes more of the processor than PostgreSQL, Kafka and the tests together.

Invariants:
- A run has one directory, removed when the run ends. The next run removes that of a run that was killed.
- A run with workers stops the local stack that it kept in memory, unless another run uses it, and removes no
  topic from it before. A run without workers leaves the stack running for the next one, for as long as it
  always goes on.
- A directory that the environment names is left unchanged.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import lease, stack_client
from outbox_pipelines.settings import load_settings

# A variable of the processes of a run that stops its stack.
STOPS: Final = "TESTS_STOP_STACK"
_MEMORY: Final = Path("/dev/shm")
_CGROUP: Final = Path("/sys/fs/cgroup")
_ENOUGH_BYTES: Final = 8 * 1024**3
# A run that has just made its directory may not have locked it yet.
_NEW_SECONDS: Final = 60.0


@contextmanager
def directories(*, workers: bool) -> Iterator[None]:
    """Keep temporary files and the local stack in memory for the length of the block."""
    if tempfile.gettempdir() != "/tmp" or not _is_enough():
        yield
        return
    # Short: the path of a socket may have 107 characters.
    place = _MEMORY / f"ob-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    _sweep(place)
    changed = {"TMPDIR": tempfile.mkdtemp(prefix="r-", dir=place)}
    own_stack = "OUTBOX_LOCAL_DIR" not in os.environ
    if own_stack:
        changed["OUTBOX_LOCAL_DIR"] = str(place / "local")
        if workers:
            changed[STOPS] = "1"
    before = {name: os.environ.get(name) for name in changed}
    try:
        with lease.locked(Path(changed["TMPDIR"]) / "lock"):
            os.environ.update(changed)
            tempfile.tempdir = None
            yield
            if own_stack and workers:
                _forget_stack()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        tempfile.tempdir = None
        shutil.rmtree(changed["TMPDIR"], ignore_errors=True)


def _is_enough() -> bool:
    """Whether there is memory for a whole run, and programs may be started from it."""
    try:
        found = os.statvfs(_MEMORY)
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    return (
        os.access(_MEMORY, os.W_OK)
        and not found.f_flag & os.ST_NOEXEC
        and min(found.f_bavail * found.f_frsize, available, *_limits()) >= _ENOUGH_BYTES
    )


def _limits() -> Iterator[int]:
    """What a container may use: files in memory count, and /proc/meminfo speaks of the whole machine."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            yield int((_CGROUP / name).read_text())


def _sweep(place: Path) -> None:
    """Remove what killed runs have left."""
    for run in place.glob("r-*"):
        with suppress(OSError):
            old = time.time() - run.stat().st_mtime > _NEW_SECONDS
            if old and not lease.is_held(run / "lock"):
                shutil.rmtree(run, ignore_errors=True)


def _forget_stack() -> None:
    home = stack_client.home_of(load_settings())
    # One that does not stop keeps its data: that is no reason for a run to fail.
    with suppress(SetupError):
        if stack_client.stop(home, even_if_kept=False):
            stack_client.forget(home)
