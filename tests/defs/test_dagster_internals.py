"""Names of Dagster that are not documented: in one file, and checked with the installed version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import dagster as dg
from dagster._annotations import is_public

import outbox_pipelines
from outbox_pipelines.defs import dagster_internals

FILES = list(Path(outbox_pipelines.__path__[0]).rglob("*.py"))
OF_DAGSTER = [file for file in FILES if "defs" in file.parts]
ALLOWED = "dagster_internals.py"


def test_they_were_checked_with_the_installed_version() -> None:
    """Guards against a new version of Dagster in which a name that is not public means something else."""
    installed = ".".join(version("dagster").split(".")[:2])
    assert installed in dagster_internals.CHECKED, "read the file, try its users, then add the version"


def test_no_other_file_uses_any() -> None:
    assert [file.name for file in FILES if "dagster._" in file.read_text()] == [ALLOWED]


def test_no_other_file_calls_what_an_instance_does_not_document() -> None:
    """Guards against a method of the instance that the next version of Dagster renames."""
    used = {(file.name, name) for file in OF_DAGSTER for name in _of_an_instance(ast.parse(file.read_text()))}
    assert ("run_history.py", "get_run_records") in used
    unknown = {each for each in used if not is_public(getattr(dg.DagsterInstance, each[1], None))}
    assert {file for file, _ in unknown} == {ALLOWED}


def test_no_file_reads_tables_of_dagster() -> None:
    """Guards against SQL that another database, or another version of Dagster, understands otherwise."""
    names = ("event_logs", "asset_check_executions", "sqlalchemy")
    assert not [file.name for file in OF_DAGSTER if any(name in file.read_text() for name in names)]


def _of_an_instance(tree: ast.AST) -> Iterator[str]:
    """Yield what is used of `instance` or `….instance`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name == "instance":
                yield node.attr
