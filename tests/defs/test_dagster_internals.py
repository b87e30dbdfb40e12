"""Names of Dagster that are not public: in one file, and checked with the installed version."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import outbox_pipelines
from outbox_pipelines.defs import dagster_internals


def test_they_were_checked_with_the_installed_version() -> None:
    """Guards against a new version of Dagster in which a name that is not public means something else."""
    installed = ".".join(version("dagster").split(".")[:2])
    assert installed in dagster_internals.CHECKED, "read the file, try its users, then add the version"


def test_no_other_file_uses_any() -> None:
    files = Path(outbox_pipelines.__path__[0]).rglob("*.py")
    users = [file.name for file in files if "dagster._" in file.read_text()]
    assert users == ["dagster_internals.py"]
