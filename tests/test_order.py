"""How tests are dealt to processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import order


def _file(path: str, tests: int, *, marker: object = None, fixtures: tuple[str, ...] = ()) -> list[Any]:
    return [
        SimpleNamespace(
            path=Path(path),
            name=f"{path}::{n}",
            get_closest_marker=lambda name: marker,
            fixturenames=fixtures,
        )
        for n in range(tests)
    ]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_each_process_begins_with_long_files(processes: int) -> None:
    """Guards against a long test that is the last one of a run, and against a test that is lost."""
    long = [*_file("tests/history/test_a.py", 3), *_file("tests/relay/test_kills.py", 2, marker=object())]
    items = [*_file("tests/a/test_a.py", 20), *long, *_file("tests/writer/test_b.py", 27)]
    dealt = order.deal(items, processes, 2)
    assert sorted(item.name for item in dealt) == sorted(item.name for item in items)
    begins, left = [0], len(items)
    for n in range(processes - 1):
        begins.append(begins[-1] + left // (processes - n))
        left = len(items) - begins[-1]
    firsts = [dealt[begin] for begin in begins]
    assert [first in long for first in firsts] == [n < 2 for n in range(processes)]


def test_a_run_of_long_files_alone() -> None:
    """Guards against files that are larger than a part."""
    items = [*_file("tests/demo/test_a.py", 30), *_file("tests/demo/test_b.py", 1)]
    assert order.deal(items, 2, 2) == items


def test_two_processes_have_all_tests_that_kill_servers() -> None:
    """Guards against a broker for each process."""
    killing = [_file(f"tests/relay/test_{name}.py", 2, fixtures=("killable", "outbox")) for name in "abc"]
    items = [item for n, file in enumerate(killing) for item in (*file, *_file(f"tests/b/test_{n}.py", 20))]
    dealt = order.deal(items, 3, 2)
    assert sorted(item.name for item in dealt) == sorted(item.name for item in items)
    parts = [dealt[:22], dealt[22:44], dealt[44:]]
    assert [sum(item in file for item in part for file in killing) for part in parts] == [4, 2, 0]
    assert sum(item in file for item in order.deal(items, 3, 1)[:22] for file in killing) == 6
    history = [_file(f"tests/history/test_{name}.py", 2, fixtures=("servers",)) for name in "abc"]
    dealt = order.deal([*(item for file in history for item in file), *items], 3, 2)
    assert [dealt[n].path.parts[1] for n in (0, 24, 48)] == ["history"] * 3
