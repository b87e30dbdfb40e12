"""The run of mutants against the tests that send their statements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.mutants import catalog

# The results of all mutants of one constant, whose statements both of two tests send.
_PROGRAM: Final = """
import json, sys
from pathlib import Path
import pytest
from tests.mutants import catalog
from tests.mutants.run import Covering, Runner

mutants = [each for each in catalog.of_area("cdc") if each.name == "END_OF_LOG"]
sends = {"seconds": 0.1, "queries": [0]}
given = {
    "texts": [" ".join(piece for each in mutants for piece in each.around)],
    "tests": {f"test_some.py::test_{name}": sends for name in ("one", "two")},
}
Path("recorded.json").write_text(json.dumps(given))
report = lambda mutant, result: print(mutant.edit.kind, result.outcome, result.by)
runner = Runner(mutants, Covering(Path("recorded.json"), 9.0), report, 60.0, 1)
pytest.main(["-p", "no:cacheprovider", "-qq", "-s", "--rootdir=.", "test_some.py"], plugins=[runner])
"""
_TESTS: Final = """
from outbox_pipelines.relay.read.slot import slot_sql

def test_one():
    pass

def test_two():
    assert "- '0/0'" in slot_sql.END_OF_LOG
"""


def test_tests_of_one_file(tmp_path: Path) -> None:
    """Guards against a run of a single file's tests that ends with an error, without a result."""
    (tmp_path / "test_some.py").write_text(_TESTS)
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": str(catalog.ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = set(ran.stdout.splitlines())
    assert {"sign killed test_some.py::test_two", "exchanged survived "} <= found, ran.stderr
