"""The API reference names what is public, and its examples run."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import orm

from outbox_pipelines import consumer, writer
from outbox_pipelines.days import archive
from tests.conftest import Outbox
from tests.writer import targets

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"writer": writer, "consumer": consumer, "archive": archive}
_DIRECTIVE = re.compile(r"^\.\. auto\w+:: (\S+?)\.(\w+)(?:\(\))?$", re.MULTILINE)


def _text(name: str) -> str:
    return (DOCS / f"api-{name}.md").read_text()


def _examples(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", _text(name), re.MULTILINE | re.DOTALL)


def _run(example: str, names: dict[str, Any]) -> None:
    # Without the future of this file.
    exec(compile(example, "example", "exec", dont_inherit=True), names)


@pytest.mark.parametrize("name", PAGES)
def test_every_public_name_is_there(name: str) -> None:
    """Guards against a function that only its source documents, and one that is gone."""
    directives = _DIRECTIVE.findall(_text(name))
    assert set(PAGES[name].__all__) <= {found for _, found in directives}
    for module, found in directives:
        assert hasattr(import_module(module), found), found


def test_the_examples_of_the_writer_run(outbox: Outbox) -> None:
    class Base(orm.DeclarativeBase):
        pass

    with outbox.connect() as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL)")
        connection.execute("INSERT INTO orders VALUES (42, 'new')")
    names: dict[str, Any] = {
        "dsn": outbox.settings.dsn.reveal(),
        "Base": Base,
        "Mapped": orm.Mapped,
        "mapped_column": orm.mapped_column,
        "sessions": orm.sessionmaker(targets.engine(outbox.settings)),
    }
    for example in _examples("writer"):
        _run(example, names)
    with outbox.connect() as connection:
        written = connection.execute("SELECT event_type FROM outbox").fetchall()
    assert sorted(written) == [("order.placed",), ("order.shipped",)]
