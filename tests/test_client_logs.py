"""No client of Kafka prints to stderr: each one has a logger."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka.admin
import pytest

_ROOT = Path(__file__).parents[1]
_CLIENTS = {"Producer", "Consumer", "AdminClient"}
# Programs as users write them.
_USERS = {"lint"}


def _sources(folder: str) -> list[Path]:
    return [each for each in sorted((_ROOT / folder).rglob("*.py")) if not _USERS.intersection(each.parts)]


def _unlogged(source: Path) -> Iterator[str]:
    """Clients that are made without a logger."""
    text = source.read_text()
    # Few files name the library: parsing all of them takes seconds.
    if "confluent_kafka" not in text:
        return
    tree = ast.parse(text)
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("confluent_kafka")
        for name in node.names
        if name.name in _CLIENTS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(each.arg == "logger" for each in node.keywords):
            name = ast.unparse(node.func)
            if name in imported or name in {f"confluent_kafka.{each}" for each in _CLIENTS}:
                yield f"{source.relative_to(_ROOT)}:{node.lineno}: {name}"


def test_each_client_of_the_package_has_a_logger() -> None:
    """Guards against lines of Kafka's client in a terminal, in place of Python's logging."""
    assert [each for source in _sources("outbox_pipelines") for each in _unlogged(source)] == []


def test_each_client_of_the_tests_is_a_quiet_one() -> None:
    """Guards against hundreds of such lines between the dots of a run."""
    found = [each for source in _sources("tests") for each in _unlogged(source)]
    assert found == [], "import it from tests.kafka_clients"


@pytest.mark.parametrize(
    "code",
    [
        "from confluent_kafka import Producer\nProducer({})",
        "import confluent_kafka\nconfluent_kafka.Consumer({})",
        "from confluent_kafka.admin import AdminClient as Admin\nAdmin({})",
    ],
)
def test_what_is_found(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_client_logs._ROOT", tmp_path)
    source = tmp_path / "made.py"
    source.write_text(code)
    assert len(list(_unlogged(source))) == 1
    source.write_text(code.replace("({})", "({}, logger=LOG)"))
    assert list(_unlogged(source)) == []


def test_the_names_are_the_librarys() -> None:
    """Guards against a search for names that the library no longer has."""
    assert all(hasattr(confluent_kafka, name) or hasattr(confluent_kafka.admin, name) for name in _CLIENTS)
