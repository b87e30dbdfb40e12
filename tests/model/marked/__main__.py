"""Break the core of a marked table's relay, and say what finds it: ``python -m tests.model.marked``."""

from __future__ import annotations

from tests.model.marked.breaks import BREAKS, found
from tests.model.relay.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(BREAKS, found))
