"""A cache of the classes of Kafka's JVM, with which a broker starts in half the CPU time.

Invariants:
- A cache is a file beside the jars. It appears under its name by a rename, so it is complete or absent.
- It only saves time: a JVM that cannot use it, or fails to write it, says nothing and goes on without it.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from typing import Final

# Each installation of the JVM has its own cache, of 65 MB; those of removed installations go.
_KEEP_SECONDS: Final = 30 * 86_400.0
# The JVM would report as an error in the broker's log why it does not use the cache.
_QUIET: Final = "-Xlog:disable"


def place(java: Path, jars: Path) -> Path:
    """Return where the cache of this JVM and these jars is, or would be."""
    # What the JVM compares: its own image and the jars, by path, size and time.
    image = java.parent.parent / "lib" / "modules"
    found = (image if image.is_file() else java).stat()
    digest = hashlib.sha256(f"{found.st_size} {found.st_mtime_ns} {jars}".encode()).hexdigest()[:8]
    return jars.with_name(f"{jars.name}.{digest}.aot")


def options(cache: Path) -> tuple[str, ...]:
    """Return the options of a JVM that uses a cache; none if there is no cache."""
    return (f"-XX:AOTCache={cache}", _QUIET) if cache.is_file() else ()


def recording(new: Path) -> tuple[str, ...]:
    """Return the options of a JVM that writes a cache when it ends in good order."""
    return (f"-XX:AOTCacheOutput={new}", _QUIET)


def settle(new: Path, cache: Path) -> None:
    """Put a recorded cache in its place, if the JVM wrote one."""
    if new.is_file():
        # By way of a neighbor, since only a rename within a file system is atomic.
        beside = cache.with_suffix(".new")
        shutil.copyfile(new, beside)
        beside.rename(cache)
    for other in cache.parent.glob("*.aot"):
        if other != cache and time.time() - other.stat().st_mtime > _KEEP_SECONDS:
            other.unlink(missing_ok=True)
