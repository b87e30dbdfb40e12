"""docs/tutorial.md: its files and commands, one after the other, print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import Outbox, clean_environment

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The servers are there already, and Dagster's pages are for the reader.
_LEFT_OUT = (
    "mkdir ",
    "python3 -m venv",
    "pip ",
    "outbox local",
    "eval ",
    "cp ",
    "dagster ",
    "outbox migrate",
)
# What differs from run to run.
_VARIES = (
    (r"\d{4}-\d\d-\d\d", "DAY"),
    (r"in \d+\.\d s", "in N s"),
    (r"events-\w+\.parquet", "FILE"),
    # In the hour after midnight yesterday stays open, with its reason.
    (r"DAY  (closed|stays open.*)\n", ""),
)


def _same(text: str) -> Counter[str]:
    """Its lines, in any order: two partitions of a topic come in any."""
    for pattern, stands_for in _VARIES:
        text = re.sub(pattern, stands_for, text)
    return Counter(text.splitlines())


@pytest.mark.extended
def test_the_tutorial(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against a newcomer whose third command fails."""
    for language, text in _FENCE.findall(TEXT):
        if language == "python":
            name = text.partition("\n")[0].removeprefix("# ")
            ours = text.replace('"order-events"', repr(outbox.topic()))
            # The group of a consumer has the name of its source, and others use this Kafka.
            (tmp_path / name).write_text(ours.replace('"billing"', repr(outbox.topic())))
    shown, script = [], ["set -e"]
    for language, text in _FENCE.findall(TEXT):
        for entry in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if not language else []:
            command, _, output = entry.partition("\n")
            if not command.startswith(_LEFT_OUT):
                script.append(command)
                shown.append(output)
    assert len(script) > 10
    environment = clean_environment() | outbox.environment
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert not _same("".join(shown)) - _same(done.stdout), done.stdout
    assert (tmp_path / "archive" / "_outbox" / "archive.json").exists()
