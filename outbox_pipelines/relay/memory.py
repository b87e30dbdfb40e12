"""The memory of a relay: its limits if events are large, and fewer garbage collections.

Invariants:
- One thread at a time has a large event in memory, from before it is read until it is published or tried.
- The memory of a large event returns to the operating system when it is freed.
- While a relay runs, the garbage collector ignores all objects that existed before.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

# Of malloc.h. Above the batches that Kafka's client makes and frees all the time.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 4 * 1024 * 1024
_LOOK_SECONDS: Final = 0.05
# Objects that are new and still there. Events in flight are tens of thousands, none of them garbage: by
# default, each 700 are searched, then searched again twice, which takes an eighth of a drain.
_NEW_OBJECTS: Final = 50_000


class EndingError(Exception):
    """The relay ends while this thread waits for the right."""


class LargeEvent:
    """One thread's access to the right to have a large event in memory.

    Args:
        right: shared by the reader and the settler.
        ending: whether to stop waiting for it. None: do not wait.
    """

    def __init__(self, right: threading.Lock, ending: Callable[[], bool] | None = None) -> None:
        self._right = right
        self._ending = ending
        self._has_right = False

    def take(self) -> bool:
        """Return whether this thread has the right now.

        Raises:
            EndingError: the relay ends before the right is free.
        """
        if not self._has_right:
            self._has_right = self._right.acquire(blocking=False)
        while not self._has_right and self._ending is not None:
            if self._ending():
                raise EndingError
            self._has_right = self._right.acquire(timeout=_LOOK_SECONDS)
        return self._has_right

    def give_back(self) -> None:
        """Return the right, if this thread has it."""
        if self._has_right:
            self._has_right = False
            self._right.release()


def return_large_blocks() -> None:
    """Make glibc's allocator return freed blocks of 4 MB and more to the operating system.

    By default glibc keeps up to 64 MB of them for each thread: the peak of a relay would be the sum of what
    its threads used at different times.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


_relays_lock: Final = threading.Lock()
_relays: Final[list[tuple[tuple[int, int, int], bool]]] = []
"""For each relay that runs in this process, what was before all of them: the collector's thresholds, and
whether something was frozen."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the garbage collector search only what is made within the block, and only after many new objects.

    What was imported before is much: a search of it stops all threads for up to 100 ms. Several threads may
    be in such a block; the last one that leaves it restores what was before. What the process has frozen
    itself stays frozen.
    """
    with _relays_lock:
        if not _relays:
            # It counts all: 30 ms for what Dagster imports, which other relays would wait for.
            is_frozen = gc.get_freeze_count() > 0
            _relays.append((gc.get_threshold(), is_frozen))
            gc.set_threshold(_NEW_OBJECTS)
            if not is_frozen:
                gc.freeze()
        else:
            _relays.append(_relays[0])
    try:
        yield
    finally:
        with _relays_lock:
            thresholds, was_frozen = _relays.pop()
            if not _relays:
                gc.set_threshold(*thresholds)
                if not was_frozen:
                    gc.unfreeze()
