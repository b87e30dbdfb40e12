"""The order of the tests where several processes share them: each begins with some of the long ones.

pytest-xdist gives each process an equal part of the list; one without tests takes the last ones of another.
A long test at the end of a part would leave all others without work: a minute of a whole run.
Servers that tests kill belong to one process: two processes, or one where few tests need them, begin with all
of these tests, and the others start none. Folders of long tests need them in every process.

Invariant: the tests of a long file stay together.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

# What starts whole installations, or waits for them.
_LONG_FOLDERS: Final = {"browser", "demo", "deploy", "fleet", "history"}
# Fixtures with a broker of this process's own, which costs five seconds of a processor.
_OWN_SERVERS: Final = {"killable", "servers", "strict"}


def deal(items: list[pytest.Item], processes: int, with_servers: int) -> list[pytest.Item]:
    """Return the tests in `processes` equal parts, which begin with about as many long files each.

    Args:
        with_servers: of how many parts the tests begin that kill servers.
    """
    files = [list(each) for _, each in groupby(items, lambda item: item.path)]
    fronts: list[list[pytest.Item]] = [[] for _ in range(processes)]
    others: list[pytest.Item] = []
    for file in files:
        if _is_in_long_folder(file):
            min(fronts, key=len).extend(file)
        elif _has_servers(file):
            min(fronts[:with_servers], key=len).extend(file)
        elif any(item.get_closest_marker("thorough") for item in file):
            min(fronts, key=len).extend(file)
        else:
            others += file
    dealt: list[pytest.Item] = []
    for n, front in enumerate(fronts):
        # As pytest-xdist divides them.
        size = (len(items) - len(dealt)) // (processes - n)
        room = max(0, size - len(front))
        dealt += [*front, *others[:room]]
        del others[:room]
    return [*dealt, *others]


def _is_in_long_folder(file: list[pytest.Item]) -> bool:
    return bool(_LONG_FOLDERS.intersection(Path(file[0].path).parts))


def _has_servers(file: list[pytest.Item]) -> bool:
    return any(_OWN_SERVERS.intersection(getattr(item, "fixturenames", ())) for item in file)
