"""The catalogue as a page for people: analysts, and developers of consumers.

Invariants:
- One file that needs no other, and nothing from the network.
- What stands in the catalogue changes the page's text, never its structure: no markup of HTML gets through.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from outbox_pipelines.catalog.document import Catalog, EventType
from outbox_pipelines.catalog.schemas import fields


def markdown(catalog: Catalog) -> str:
    """The page as Markdown: a table of all types, then a section each."""
    return "\n".join(_lines(catalog)) + "\n"


def page(catalog: Catalog) -> str:
    """The same as a whole HTML document."""
    # Here, because Markdown alone does without.
    import mistune

    class Renderer(mistune.HTMLRenderer):
        """Headings that the table of all types leads to."""

        def image(self, text: str, url: str, title: str | None = None) -> str:
            """Its words: whoever opens the page is not to be seen by the image's server."""
            return html.escape(html.unescape(text))

        def heading(self, text: str, level: int, **attrs: Any) -> str:
            anchor = _anchor(html.unescape(re.sub("<.*?>", "", text)))
            return f'<h{level} id="{html.escape(anchor)}">{text}</h{level}>\n'

    body = mistune.create_markdown(renderer=Renderer(escape=True), plugins=["table"])(markdown(catalog))
    return _DOCUMENT.format(body=body)


def _lines(catalog: Catalog) -> Iterator[str]:
    yield "# Event types"
    yield ""
    yield "| event type | what happened | producer | consumers | owner | lifecycle |"
    yield "|---|---|---|---|---|---|"
    for name, each in catalog.events.items():
        first, *_ = each.description.strip().split("\n\n")
        cells = (first, each.producer, ", ".join(each.consumers), each.owner, each.lifecycle)
        yield f"| [{_code(name)}](#{_anchor(name)}) | {' | '.join(_cell(cell) for cell in cells)} |"
    for name, each in catalog.events.items():
        yield ""
        yield from _section(name, each)


def _section(name: str, each: EventType) -> Iterator[str]:
    yield f"## {_code(name)}"
    yield ""
    yield each.description.strip()
    yield ""
    since = f" since {each.retired_on}" if each.retired_on else ""
    yield f"- lifecycle: **{each.lifecycle}**{since}"
    yield f"- topic: {_code(each.topic) if each.topic else 'by the aggregate type'}"
    yield f"- producer: {_text(each.producer)}"
    yield f"- consumers: {_text(', '.join(each.consumers)) or 'none that is known'}"
    yield f"- owner: {_text(each.owner)}"
    yield ""
    found = fields(each.payload or {})
    if not found:
        yield "Its payload is not described." if each.payload is None else "Its schema names no fields."
        return
    yield "| field | type | required | |"
    yield "|---|---|---|---|"
    for field in found:
        required = "yes" if field.required else ""
        yield f"| {_code(field.name)} | {_cell(field.kind)} | {required} | {_cell(field.description)} |"


def _text(words: str) -> str:
    """Words as they stand, none of them markup."""
    return re.sub(r"([\\`*_\[\]<>~#])", r"\\\1", " ".join(words.split()))


def _cell(words: str) -> str:
    return _text(words).replace("|", "\\|")


def _code(name: str) -> str:
    return f"`{' '.join(name.split()).replace('`', chr(39))}`".replace("|", "\\|")


def _anchor(name: str) -> str:
    """As GitHub makes one of a heading, so that links work there too."""
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


_DOCUMENT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width">
<title>Event types</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; vertical-align: top; }}
h2 {{ margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }}
code {{ background: #f3f3f3; padding: .1rem .25rem; }}
</style>
{body}</html>
"""
