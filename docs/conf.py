"""The pages of this folder as a site: `make docs`.

Invariants:
- A build is strict about links and anchors and uses no network: no fonts, scripts or inventories of others.
- Every page of this folder is linked in a list of index.md, of which the table of contents is made. Some show
  a file from outside, and files.md ends with a list of the package's files.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import files_page

project = "Outbox Pipelines"
copyright = "the authors of Outbox Pipelines"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "Outbox Pipelines"
html_copy_source = False
html_show_sourcelink = False

# A heading's anchor is what forges make of it, so that a link works on both.
myst_heading_anchors = 4
# "…" in an example stands for a value, and no lexer knows it.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Types of other packages have no page here, and neither have names that are ours alone.
nitpick_ignore_regex = [
    ("py:.*", r"(?!outbox_pipelines\.).*"),
    ("py:.*", r".*\.(_\w+|Handler|Payload|BodyReader|SchemaReader|PayloadReader|EventCatalog)"),
]

# Alembic logs that it is imported.
logging.getLogger("alembic").setLevel(logging.WARNING)

_SHOWN = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "examples": "examples/README.md",
    "security": "SECURITY.md",
}


def _show_file(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the content of a page by that of a file outside; only links to pages stay links."""
    if page not in _SHOWN:
        return
    text = (Path(app.srcdir).parent / _SHOWN[page]).read_text()
    for name, file in _SHOWN.items():
        text = text.replace(f"]({file})", f"](docs/{name}.md)")
    text = re.sub(r"\[([^\]]+)\]\((?!https?://|docs/|#)[^)]+\)", r"\1", text)
    source[0] = text.replace("](docs/", "](")


def _list_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the list of files to its page."""
    if page == "files":
        source[0] += files_page.listing()


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the table of contents of the front page's lists; a link to a chapter does not count."""
    if page == "index":
        lists = re.findall(r"^- \*\*(.+?)\*\*(.+?)(?=^- |\Z)", source[0], re.MULTILINE | re.DOTALL)
        for caption, links in lists:
            pages = "\n".join(re.findall(r"\]\(([\w-]+)\.md\)", links))
            source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{pages}\n```\n"


def _read_markdown(
    app: Sphinx, what: str, name: str, obj: object, options: dict[str, Any], lines: list[str]
) -> None:
    """Docstrings have code between single backticks; reStructuredText has it between two."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _show_file)
    app.connect("source-read", _list_files)
    app.connect("source-read", _add_contents)
    # Before napoleon, which has the usual priority of 500.
    app.connect("autodoc-process-docstring", _read_markdown, priority=400)
