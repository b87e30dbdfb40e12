"""File locks: who uses the local stack, and whether its supervisor lives.

Invariants:
- The kernel holds the locks, so a process that is killed or a machine that restarts leaves none behind.
- Users of the stack share the lease. A process with the exclusive lease knows that the stack has no users,
  and new users wait until it releases the lease.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox_pipelines.errors import SetupError

POLL_SECONDS = 0.02


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """An open, locked file descriptor, or None where others hold a lock that excludes this one."""
    try:
        import fcntl
    except ImportError:
        raise SetupError(
            "the local stack needs Linux or macOS: set OUTBOX_DSN and OUTBOX_KAFKA to existing servers"
        ) from None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, *, shared: bool = False, seconds: float = 0.0) -> Iterator[int | None]:
    """Hold a lock, alone or as one of many, for the length of the block; yields its descriptor.

    Args:
        seconds: after this time without the lock it yields None.
    """
    deadline = time.monotonic() + seconds
    while (descriptor := try_lock(path, shared=shared)) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether some process holds the lock alone."""
    # A shared attempt, so that two processes that ask at once do not see each other.
    descriptor = try_lock(path, shared=True)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
