"""The list of the page files.md, made of the first line of each file's docstring: `make docs` adds it.

`.venv/bin/python docs/files_page.py` prints it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("outbox_pipelines", "tests/history", "tests/model")


def purpose(file: Path) -> str:
    """Return the first line of a file's docstring; empty if it has none."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file that has content with its purpose: folder by folder, a package's own file first."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.stat().st_size]
    for path in sorted(paths, key=lambda path: (path.parent, path.name)):
        yield path, purpose(path)


def listing() -> str:
    """Return the list, in Markdown: a heading for each folder."""
    lines: list[str] = []
    folder = None
    for path, text in files():
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"## {folder.relative_to(ROOT)}/"]
        lines += [text, ""] if path.name == "__init__.py" else [f"- `{path.name}`: {text}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing())
