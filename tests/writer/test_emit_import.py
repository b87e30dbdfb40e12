"""What importing the writer costs an application."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
before = set(sys.modules)
import outbox_pipelines.writer
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# Of the standard library, what is known to be slow to import.
HEAVY = {"asyncio", "inspect", "dataclasses", "logging", "pathlib", "importlib.metadata", "typing_extensions"}


def test_only_the_standard_library_is_imported() -> None:
    """Guards against a writer that brings the relay's drivers, or pydantic, into every application."""
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    names = set(json.loads(printed))
    others = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert "outbox_pipelines.writer" in others
    assert "outbox_pipelines.writer.testing" not in others
    assert {name for name in others if not re.match(r"outbox_pipelines(\.writer|$)", name)} == set()
    assert not names & HEAVY
    # Some 50 modules in 20 ms; the count does not depend on how busy the machine is.
    assert len(names) < 60


def test_no_driver_is_needed_to_be_refused() -> None:
    """Guards against an ImportError of SQLAlchemy in an application with psycopg only, and vice versa."""
    program = """
import sys
for name in ("psycopg", "sqlalchemy", "sqlalchemy.orm", "asyncpg", "django", "django.db"):
    sys.modules[name] = None
from outbox_pipelines.writer import OutboxError, emit
try:
    emit(object(), "order", 1, "e", {})
except OutboxError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot write through builtins.object: pass a connection")


@pytest.mark.parametrize(
    ("module", "frameworks"),
    [
        ("outbox_pipelines.writer.sqlalchemy", {"sqlalchemy"}),
        ("outbox_pipelines.alembic", {"alembic", "sqlalchemy"}),
        ("outbox_pipelines.django.operations", {"django"}),
    ],
)
def test_an_integration_needs_its_framework_alone(module: str, frameworks: set[str]) -> None:
    """Guards against an ImportError of the relay's packages, or of another framework, with only the
    writer."""
    others = {"psycopg", "asyncpg", "pydantic", "click", "confluent_kafka", "dagster"}
    others |= {"sqlalchemy", "alembic", "django"} - frameworks
    program = f"import sys; sys.modules |= dict.fromkeys({others}); import {module}"
    subprocess.run([sys.executable, "-c", program], check=True)
