"""The hook for pre-commit: `.pre-commit-hooks.yaml` names what is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOOK = dict(
    re.findall(r"^(?:- |  )(\w+): (.*)$", (ROOT / ".pre-commit-hooks.yaml").read_text(), re.MULTILINE)
)


def test_its_entry_runs(tmp_path: Path) -> None:
    """Guards against a hook that fails wherever it is installed, or takes application files for a library."""
    assert HOOK["id"] == "outbox-lint-writes"
    (tmp_path / "click.py").write_text("raise SystemExit('the application is run')\n")
    (tmp_path / "clean.py").write_text("import outbox_pipelines.writer\n")
    python, *rest = shlex.split(HOOK["entry"])
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *rest, "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "no findings in 2 files\n")


def test_it_reads_the_whole_application() -> None:
    """Guards against a hook that gets only a commit's files: rules that look across files would know half."""
    assert (HOOK["pass_filenames"], HOOK["args"]) == ("false", '["."]')


def test_it_installs_what_the_command_needs() -> None:
    """Guards against a version of click that the extra has raised and the hook has not."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lint"]
    assert HOOK["additional_dependencies"] == f'["{", ".join(lint)}"]'
