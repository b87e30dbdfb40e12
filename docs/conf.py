"""The pages of this folder as a site: `make docs`.

Invariants:
- A build is strict about links and anchors and uses no network: no fonts, scripts or inventories of others.
- Every page of this folder is in the table of contents of index.md.
"""

from __future__ import annotations

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
