"""`python -m tests.matrix [CELL]...`: runs a part of the suite with each Python and PostgreSQL.

Invariants:
- Each Python has an environment of its own in `build/matrix`, from the lock file; each cell its own stack.
- What is missing is skipped, and the table says why.

Exit codes: 0 success; 1 a cell failed; 2 there is no such cell.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.matrix.cells import Cell, cells, find_postgres, find_pythons

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "matrix"
# The core of the relay, and a relay with PostgreSQL and Kafka.
_RELAY: Final = (
    "tests/relay/test_core.py",
    "tests/relay/test_publisher.py",
    "tests/relay/test_quarantine.py",
    "tests/relay/test_relay.py",
)
# With them, the writer and the SQL files.
TESTS: Final = (
    "tests/writer/test_emit_content.py",
    "tests/writer/test_emit_targets.py",
    "tests/writer/test_emit_many.py",
    "tests/schema/test_migrate.py",
    "tests/schema/test_psql.py",
    *_RELAY,
)
# All that sends SQL of its own; `make test` runs most of it on one PostgreSQL.
TESTS_OF_POSTGRES: Final = (
    "tests/days/archive",
    "tests/consumer/test_dedupe_table.py",
    "tests/consumer/test_other_languages.py",
    "tests/consumer/test_processed_mark.py",
    "tests/consumer/test_tables.py",
    "tests/examples/test_dapr_shop.py",
    "tests/guide",
    "tests/days/partitions",
    "tests/schema",
    "tests/writer",
    *_RELAY,
)


def main(names: list[str]) -> int:
    every = cells(find_pythons(), find_postgres(), Path(sys.executable))
    if unknown := set(names) - {each.name for each in every}:
        print(f"no such cell: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for cell in every:
        if names and cell.name not in names:
            continue
        passed, result = (True, f"skipped: {cell.skipped}") if cell.skipped else _run(cell)
        has_failed |= not passed
        print(f"{cell.name:<14} {result}", flush=True)
    return int(has_failed)


def _run(cell: Cell) -> tuple[bool, str]:
    """Run the tests; return whether they passed, and a line for the table."""
    log = FOLDER / f"{cell.name}.log"
    assert cell.python is not None
    with log.open("w") as output:
        python = _environment(cell, output.fileno())
        if python is None:
            return False, f"failed: its environment could not be made: {log.relative_to(ROOT)}"
        with tempfile.TemporaryDirectory(prefix="outbox-") as folder:
            environment = os.environ | {"OUTBOX_LOCAL_DIR": f"{folder}/local"}
            if cell.postgres is not None:
                environment["OUTBOX_LOCAL_POSTGRES"] = str(cell.postgres)
            # A test that runs on two servers takes the cell's alone.
            tests = [
                *(TESTS_OF_POSTGRES if cell.postgres else TESTS),
                "-k",
                "not machine",
                "-p",
                "no:cacheprovider",
            ]
            code = _call(python, "-m", "pytest", *tests, environment=environment, output=output.fileno())
            down = ["local", "down", "--forget"]
            _call(python, "-m", "outbox_pipelines", *down, environment=environment, output=output.fileno())
    summary = [line for line in log.read_text().splitlines() if " passed" in line or " failed" in line]
    if code:
        return False, f"failed: {log.relative_to(ROOT)}"
    return True, summary[-1].strip("= ")


def _environment(cell: Cell, output: int) -> Path | None:
    """Return the interpreter of the cell's environment, made at its first run; None if that failed."""
    assert cell.python is not None
    if cell.python == Path(sys.executable):
        return cell.python
    place = FOLDER / cell.name
    python, ready, lock = place / "bin" / "python", place / "ready", ROOT / "locks" / "dev.txt"
    if ready.is_file() and ready.read_bytes() == lock.read_bytes():
        return python
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    made = (
        _call(cell.python, "-m", "venv", "--clear", str(place), output=output)
        or _call(python, *pip, "--require-hashes", "-r", str(lock), output=output)
        or _call(python, *pip, "--no-deps", "--no-build-isolation", "-e", ".", output=output)
    )
    if made:
        return None
    ready.write_bytes(lock.read_bytes())
    return python


def _call(
    python: Path, *arguments: str, environment: dict[str, str] | None = None, output: int | None = None
) -> int:
    command = [str(python), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
