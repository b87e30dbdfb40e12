"""The outbox as an app of Django, in a project as `startproject` makes it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.core.scripts import files
from tests.schema.events import insert
from tests.schema.servers import Database

# The SQL that it runs is tried on both by other tests.
pytestmark = pytest.mark.parametrize("server", ["wheel"], indirect=True)

ROOT = Path(__file__).parents[2]
SETTINGS = """
import os
POSTGRES = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ["NAME"], "USER": os.environ["USER"], "HOST": "127.0.0.1", "PORT": os.environ["PORT"],
}
DATABASES = {"default": POSTGRES}
INSTALLED_APPS = ["outbox_pipelines.django"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

Manage = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def manage(tmp_path: Path, empty: Database) -> Manage:
    """Runs a command of Django; its settings can be added to in `settings.py`."""
    (tmp_path / "settings.py").write_text(SETTINGS)
    at = {str(name): str(value) for name, value in psycopg.conninfo.conninfo_to_dict(empty.dsn).items()}
    environment = {"NAME": at["dbname"], "USER": at["user"], "PORT": at["port"], "PGPASSFILE": at["passfile"]}

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "django", *arguments, "--settings", "settings"],
            cwd=tmp_path,
            env=os.environ | environment | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            text=True,
            check=check,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return run


def is_as_migrate_makes_it(database: Database) -> bool:
    checked = database.outbox("migrate", "--check")
    return checked.output == "the schema is up to date\n"


def test_migrate_there_and_back(manage: Manage, empty: Database) -> None:
    """Guards against a second description of the schema; leftover objects that stop the next migrate."""
    manage("migrate", "outbox_pipelines")
    assert is_as_migrate_makes_it(empty)
    assert empty.outbox("migrate").output == "nothing to do\n"
    manage("migrate", "outbox_pipelines", "zero")
    assert empty.rows("SELECT FROM pg_class WHERE relname LIKE 'outbox%'") == []
    assert empty.rows("SELECT FROM pg_proc WHERE proname LIKE 'outbox%'") == []
    manage("migrate")
    assert is_as_migrate_makes_it(empty)


def test_where_the_outbox_is_already(manage: Manage, empty: Database) -> None:
    """Guards against a project that began with `outbox migrate`, and cannot move to the app."""
    assert empty.outbox("migrate").exit_code == 0
    before = empty.rows("SELECT oid, xmin FROM pg_class WHERE relname LIKE 'outbox%' ORDER BY 1")
    manage("migrate")
    assert empty.rows("SELECT oid, xmin FROM pg_class WHERE relname LIKE 'outbox%' ORDER BY 1") == before


@pytest.mark.extended
def test_the_way_back_loses_no_events(manage: Manage, empty: Database, tmp_path: Path) -> None:
    """Guards against unpublished events, dropped with their table."""
    manage("migrate")
    with empty.connect() as connection:
        insert(connection)
    refused = manage("migrate", "outbox_pipelines", "zero", check=False)
    assert refused.returncode != 0
    assert "not published, nothing was dropped" in refused.stdout
    assert empty.value("SELECT count(*) FROM outbox") == 1
    (tmp_path / "settings.py").write_text(f"{SETTINGS}OUTBOX_DROP_UNPUBLISHED = True\n")
    manage("migrate", "outbox_pipelines", "zero")
    assert empty.value("SELECT to_regclass('outbox') IS NULL")


@pytest.mark.extended
def test_the_app_is_up_to_date(manage: Manage) -> None:
    """Guards against a new file of `sql/` that databases which have the app's migrations never get."""
    assert manage("makemigrations", "--check").stdout == "No changes detected\n"
    planned = manage("migrate", "--plan").stdout
    assert planned.splitlines()[-1].endswith(f"up to {files()[-1].stem}")


@pytest.mark.extended
def test_a_script(manage: Manage, empty: Database) -> None:
    """Guards against `sqlmigrate` output that is empty, or that has doubled percent signs."""
    empty.rows(manage("sqlmigrate", "outbox_pipelines", "0001").stdout)
    assert is_as_migrate_makes_it(empty)


@pytest.mark.extended
def test_several_databases(manage: Manage, empty: Database, tmp_path: Path) -> None:
    """Guards against a syntax error on SQLite; an outbox where the project's router allows none."""
    (tmp_path / "settings.py").write_text(f"""{SETTINGS}
DATABASES["lite"] = {{"ENGINE": "django.db.backends.sqlite3", "NAME": "lite"}}
DATABASES["other"] = POSTGRES
class Router:
    def allow_migrate(self, db, app_label, **hints):
        assert app_label == "outbox_pipelines"
        return db != "other"
DATABASE_ROUTERS = [Router()]
""")
    manage("migrate", "--database", "lite")
    manage("migrate", "--database", "other")
    assert empty.value("SELECT to_regclass('outbox') IS NULL")
    manage("migrate", "outbox_pipelines", "zero")
    manage("migrate", "--database", "default")
    assert is_as_migrate_makes_it(empty)
    manage("migrate", "--database", "other", "outbox_pipelines", "zero")
    assert is_as_migrate_makes_it(empty)


@pytest.mark.extended
def test_the_test_runner(manage: Manage, tmp_path: Path) -> None:
    """Guards against a flush between tests that truncates what refuses it; a test database without outbox."""
    (tmp_path / "tests.py").write_text("""
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from outbox_pipelines.writer import AutocommitError, emit

class InATransaction(TestCase):
    def test_it(self):
        assert emit(connection, "order", 1, "order.placed", {}).seq is not None

class WithoutOne(TransactionTestCase):
    def test_it(self):
        with self.assertRaises(AutocommitError):
            emit(connection, "order", 1, "order.placed", {})
        with transaction.atomic():
            emit(connection, "order", 1, "order.placed", {})

class WithoutOneAgain(WithoutOne):
    serialized_rollback = True
""")
    done = manage("test", "--noinput", check=False)
    assert "Ran 3 tests" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout
