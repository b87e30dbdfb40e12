"""The switch as a migration of Alembic and of Django, on databases that are new and that have events."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.config.schema import literal
from tests.conftest import clean_environment
from tests.existing import guides
from tests.existing.adopt.conftest import SCHEMA, Adopted, Make

ROOT = Path(__file__).parents[3]
KEY = "00000000-0000-0000-0000-000000000001"
Tool = Callable[..., subprocess.CompletedProcess[str]]

ENV = """
import sqlalchemy as sa
from alembic import context

url = context.config.get_main_option("sqlalchemy.url")
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
"""
FIRST = """
from alembic import op
revision, down_revision = "1", None

def upgrade():
    op.execute("CREATE TABLE IF NOT EXISTS earlier (id int)")

def downgrade(): ...
"""
_PAGE = (ROOT / "docs" / "adopt.md").read_text()
_PRINTED = dict(
    re.findall(r"^```python\n# (Alembic|Django)[^\n]*\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
)
SETTINGS = """
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.postgresql", "NAME": {dbname!r}, "USER": {user!r}, "HOST": {host!r},
    "PORT": {port!r}, "OPTIONS": {{"passfile": {passfile!r}}},
}}}}
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""


def _printed(tool: str, file: str, changes: dict[str, str]) -> str:
    """The migration of docs/adopt.md, for this table."""
    text: str = _PRINTED[tool]
    usual = {'"adopt.toml", "outbox"': f"{file!r}, {SCHEMA!r}", ', accept=["column:tenant"]': ""}
    for theirs, ours in (usual | changes).items():
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


def _at(adopted: Adopted) -> dict[str, str]:
    found = psycopg.conninfo.conninfo_to_dict(adopted.settings.dsn)
    return {name: str(value) for name, value in found.items()}


def _run(adopted: Adopted, *words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    # The database is the tool's, Kafka the relay's.
    environment = {
        name: value for name, value in adopted.environment.items() if name in ("OUTBOX_KAFKA", "OUTBOX_TOPIC")
    }
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=directory,
        env=clean_environment() | environment | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def _config(adopted: Adopted, directory: Path) -> str:
    """An `outbox.toml` with the table."""
    file = directory / "outbox.toml"
    file.write_text(f"table = {literal(adopted.settings.table)}\n")
    return str(file)


def _alembic(adopted: Adopted, directory: Path) -> Tool:
    (directory / "versions").mkdir()
    (directory / "env.py").write_text(ENV)
    (directory / "versions" / "1.py").write_text(FIRST)
    file = _config(adopted, directory)
    text = 'revision, down_revision = "2", "1"\n' + _printed("Alembic", file, {})
    (directory / "versions" / "2.py").write_text(text)
    at = _at(adopted)
    url = f"postgresql+psycopg://{at['user']}@{at['host']}:{at['port']}/{at['dbname']}?passfile={at['passfile']}"
    (directory / "alembic.ini").write_text(
        f"[alembic]\nscript_location = .\npath_separator = os\nsqlalchemy.url = {url}\n"
    )
    return lambda *words: _run(adopted, "alembic", *words, directory=directory)


def _django(adopted: Adopted, directory: Path, *, atomic: bool = False) -> Tool:
    folder = directory / "shop" / "migrations"
    folder.mkdir(parents=True)
    for each in (directory / "shop", folder):
        (each / "__init__.py").touch()
    changes = {"atomic = False": f"atomic = {atomic}", '[("shop", "0007_orders")]': "()"}
    text = _printed("Django", _config(adopted, directory), changes)
    (folder / "0001_adopt.py").write_text(text)
    (directory / "settings.py").write_text(SETTINGS.format(**_at(adopted)))
    return lambda *words: _run(adopted, "django", *words, "--settings", "settings", directory=directory)


def _there_and_back(
    adopted: Adopted, forwards: Callable[[], object], backwards: Callable[[], object]
) -> None:
    adopted.write((KEY, 0))
    forwards()
    adopted.write((KEY, 1))
    assert adopted.state() == "draining"
    adopted.drain()
    adopted.write((KEY, 2))
    backwards()
    assert adopted.state() == "prepared"
    adopted.write((KEY, 3))
    adopted.relay(table=True)
    assert adopted.numbers() == {KEY: [0, 1, 2, 3]}


@pytest.mark.extended
def test_alembic(make: Make, tmp_path: Path) -> None:
    """Guards against a migration that waits for its own transaction, or loses what waits on the way back."""
    adopted = make(guides.A)
    alembic = _alembic(adopted, tmp_path)

    def run(*words: str) -> None:
        done = alembic(*words)
        assert done.returncode == 0, done.stdout

    _there_and_back(adopted, lambda: run("upgrade", "head"), lambda: run("downgrade", "1"))


@pytest.mark.extended
def test_alembic_as_a_script(make: Make, tmp_path: Path) -> None:
    """Guards against a script that leaves the switch out without a word."""
    done = _alembic(make(guides.A), tmp_path)("upgrade", "head", "--sql")
    assert done.returncode != 0
    assert "a script (--sql) cannot contain the switch" in done.stdout


@pytest.mark.extended
def test_django(make: Make, tmp_path: Path) -> None:
    """The same for Django."""
    adopted = make(guides.A)
    manage = _django(adopted, tmp_path)

    def run(*words: str) -> None:
        done = manage(*words)
        assert done.returncode == 0, done.stdout

    assert "outbox adopt plan" in manage("sqlmigrate", "shop", "0001").stdout
    _there_and_back(adopted, lambda: run("migrate"), lambda: run("migrate", "shop", "zero"))


def test_django_in_a_transaction(make: Make, tmp_path: Path) -> None:
    """Guards against a session that waits for the migration's own locks."""
    done = _django(make(guides.A), tmp_path, atomic=True)("migrate")
    assert done.returncode != 0
    assert "write atomic = False" in done.stdout


@pytest.mark.extended
@pytest.mark.parametrize("tool", [pytest.param("alembic", marks=pytest.mark.extended), "django"])
def test_an_empty_table_needs_no_drain(make: Make, tmp_path: Path, tool: str) -> None:
    """Guards against databases of tests in which the relay waits."""
    adopted = make(guides.A)
    done = (
        _alembic(adopted, tmp_path)("upgrade", "head")
        if tool == "alembic"
        else _django(adopted, tmp_path)("migrate")
    )
    assert done.returncode == 0, done.stdout
    assert adopted.state() == "adopted"
    adopted.write((KEY, 0))
    adopted.relay()
    assert adopted.numbers() == {KEY: [0]}
