"""`python -m tests.coverage [PYTEST ARGUMENT]...`: runs tests and prints what of the package they run.

Invariants:
- The processes that tests start are measured too, except those that are killed.
- The tables are printed if tests fail, too; the exit code is that of the tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.coverage.table import tables

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "coverage"
# A wrong argument, or no tests: pytest has said which.
_NOTHING_RAN: Final = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


def main(arguments: list[str]) -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    code = _coverage("run", "-m", "pytest", *arguments)
    if code in _NOTHING_RAN:
        return code
    found = FOLDER / "coverage.json"
    for command in (["combine", "--quiet"], ["json", "--quiet", "-o", str(found)]):
        if _coverage(*command):
            return code or 1
    print(tables(json.loads(found.read_text())["files"]))
    return code


def _coverage(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
