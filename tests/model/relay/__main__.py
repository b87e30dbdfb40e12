"""Break the relay's core on purpose, and say what finds it: ``python -m tests.model.relay``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.model.explore import Result
from tests.model.relay.breaks import BREAKS, Break, Patch, found


def main(breaks: Mapping[str, Break] = BREAKS, find: Callable[[Break, Patch], Result] = found) -> int:
    """Print a row for each break; return 1 if one is not found."""
    missed = 0
    for one in breaks.values():
        replaced: list[tuple[Any, str, Any]] = []

        def patch(target: Any, name: str, value: Any, replaced: list[Any] = replaced) -> None:
            replaced.append((target, name, target.__dict__[name]))
            setattr(target, name, value)

        began = time.monotonic()
        try:
            result = find(one, patch)
        finally:
            for target, attribute, value in reversed(replaced):
                setattr(target, attribute, value)
        seconds = time.monotonic() - began
        by = result.broken.invariant if result.broken else "NOT FOUND"
        missed += result.broken is None
        print(f"| {one.about} | {by} | {result.states:,} | {seconds:.1f} s |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
