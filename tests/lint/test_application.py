"""What is known only from several files together, and which files are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.lint.linter import Options, check, check_sources, python_files

INSERT = 'cursor.execute("INSERT INTO outbox (payload) VALUES (1)")\n'
VIEW = """
from django.db import connection
from outbox_pipelines.writer import emit

def place(request):
    emit(connection, "order", 1, "e", {})
"""


def codes(options: Options = Options(), **sources: str) -> list[str]:  # noqa: B008 - frozen
    findings = check_sources({f"{name}.py": source.encode() for name, source in sources.items()}, options)
    return [finding.code for finding in findings]


@pytest.mark.parametrize(
    "importing",
    [
        "from outbox_pipelines.writer import emit",
        "from outbox_pipelines import writer",
        "import outbox_pipelines.writer",
        "def f():\n    import outbox_pipelines.writer as w",
    ],
)
def test_direct_inserts_where_the_writer_is_available(importing: str) -> None:
    """Guards against an insert past `emit` in a file that does not import it itself."""
    assert codes(orders=INSERT, events=importing) == ["OB007"]


def test_direct_inserts_elsewhere() -> None:
    """Guards against an alarm in an application with its own way to write the table, as the README offers."""
    assert codes(orders=INSERT) == []
    assert codes(Options(strict_inserts=True), orders=INSERT) == ["OB007"]


def test_a_model_of_another_file() -> None:
    """Guards against a model that is known only in the file which defines it, or means another table."""
    use = "import outbox_pipelines.writer\nfrom sqlalchemy.orm import Session\n"
    use += "from shop.models import Event\ndef f(s: Session):\n    s.add(Event())\n"
    for mapped in ('__tablename__ = "outbox"', '__tablename__: str = "outbox"'):
        assert codes(models=f"class Event:\n    {mapped}\n", use=use) == ["OB007"]
    assert codes(models='class Event:\n    class Meta:\n        db_table = "outbox"\n', use=use) == ["OB007"]
    assert codes(models='class Event:\n    __tablename__ = "events"  # no outbox\n', use=use) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ('DATABASES = {"default": {"ATOMIC_REQUESTS": True}}', []),
        ('DATABASES["default"]["ATOMIC_REQUESTS"] = env.bool("ATOMIC", True)', []),
        ('DATABASES = {"default": {"ATOMIC_REQUESTS": False}}', ["OB001"]),
        ("ATOMIC_REQUESTS = True", ["OB001"]),
    ],
)
def test_atomic_requests(settings: str, expected: list[str]) -> None:
    """Guards against an alarm for every view of a project whose requests are transactions."""
    assert codes(views=VIEW, settings=settings) == expected
    assert codes(Options(atomic_requests=True), views=VIEW, settings=settings) == []


def test_atomic_requests_are_for_views() -> None:
    """Guards against a command that is excused with the views, although no request wraps it."""
    command = VIEW.replace("def place(request)", "@app.task\ndef place(order)")
    assert codes(Options(atomic_requests=True), tasks=command) == ["OB001"]


def test_directories_that_are_left_out(tmp_path: Path) -> None:
    """Guards against findings in third-party libraries, or a directory of the application passed over."""
    for name in ("shop/orders.py", "shop/migrations/0001.py", "shop/build/x.py"):
        _write(tmp_path / name)
    for name in (".git/a.py", "env/lib/b.py", "web/node_modules/c.py", "lib/site-packages/d.py", "notes.txt"):
        _write(tmp_path / name)
    _write(tmp_path / "env/pyvenv.cfg")
    (tmp_path / "shop" / "again").symlink_to(tmp_path)
    (tmp_path / "shop" / "gone.py").symlink_to(tmp_path / "nowhere")
    names = [str(path.relative_to(tmp_path)) for path in python_files([tmp_path])]
    assert names == ["shop/orders.py", "shop/build/x.py", "shop/migrations/0001.py"]


def test_what_is_named_is_read(tmp_path: Path) -> None:
    """Guards against a named file that is passed over because of its name or place, or one read twice."""
    hidden, script = tmp_path / ".hidden" / "a.py", tmp_path / "script"
    _write(hidden)
    _write(script)
    assert python_files([hidden, script, hidden.parent]) == [hidden, script]
    assert [finding.code for finding in check([script], Options(strict_inserts=True))] == ["OB007"]


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(INSERT)
