"""Render the event catalog as a page, for analysts and developers of consumers.

Invariants:
- The page is one self-contained file that loads nothing from the network.
- The catalog's texts change the page's text, never its structure: HTML markup in them is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from outbox_pipelines.catalog.document import Catalog, EventType
from outbox_pipelines.catalog.schemas import fields


def markdown(catalog: Catalog, *, topics_url: str | None = None) -> str:
    """Return the page as Markdown: a table of all types, then a section for each.

    Args:
        topics_url: what the address of a topic's page begins with.
    """
    # A backslash would be undone by one before it.
    return "\n".join(_lines(catalog, topics_url, less_than="&lt;")) + "\n"


def page(catalog: Catalog, *, topics_url: str | None = None) -> str:
    """Return the page as a complete HTML document; see `markdown`."""
    # Imported here, because Markdown output does not need it.
    import mistune

    class Renderer(mistune.HTMLRenderer):
        """Renders headings with anchors, to which the table of all types links."""

        def image(self, text: str, url: str, title: str | None = None) -> str:
            """Return the image's text only: loading it would reveal the page's readers to its server."""
            return html.escape(html.unescape(text))

        def heading(self, text: str, level: int, **attrs: Any) -> str:
            anchor = _anchor(html.unescape(re.sub("<.*?>", "", text)))
            return f'<h{level} id="{html.escape(anchor)}">{text}</h{level}>\n'

    body = mistune.create_markdown(renderer=Renderer(escape=True), plugins=["table"])(
        "\n".join(_lines(catalog, topics_url, less_than="<"))
    )
    return _DOCUMENT.format(body=body)


def _lines(catalog: Catalog, topics_url: str | None, *, less_than: str) -> Iterator[str]:
    """Yield the page.

    Args:
        less_than: what replaces < in a description, which may have other markup, such as a link.
    """
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
        yield from _section(name, each, topics_url, less_than)


def _section(name: str, event_type: EventType, topics_url: str | None, less_than: str) -> Iterator[str]:
    yield f"## {_code(name)}"
    yield ""
    yield event_type.description.strip().replace("<", less_than)
    yield ""
    since = f" since {event_type.retired_on}" if event_type.retired_on else ""
    yield f"- lifecycle: **{event_type.lifecycle}**{since}"
    topic = _code(event_type.topic) if event_type.topic else "by the aggregate type"
    is_linked = event_type.topic and topics_url
    yield (
        f"- topic: [{topic}]({str(topics_url).rstrip('/')}/{event_type.topic})"
        if is_linked
        else f"- topic: {topic}"
    )
    if event_type.aggregate_type:
        yield f"- aggregate type: {_code(event_type.aggregate_type)}"
    if event_type.aggregate_id:
        yield f"- id of the aggregate: {_code(event_type.aggregate_id)}"
    if event_type.protected:
        yield f"- encrypted for a person: {', '.join(map(_code, event_type.protected))}"
    if event_type.version:
        earlier = ", ".join(map(str, sorted(event_type.versions)))
        yield f"- version: {event_type.version}" + (f"; earlier ones: {earlier}" if earlier else "")
    if event_type.deliver_after:
        yield f"- delivered after: {event_type.deliver_after}"
    if event_type.protobuf:
        yield f"- message of Protobuf: {_code(event_type.protobuf.message)}"
    yield f"- producer: {_text(event_type.producer)}"
    yield f"- consumers: {_text(', '.join(event_type.consumers)) or 'none known'}"
    yield f"- owner: {_text(event_type.owner)}"
    yield ""
    members = fields(event_type.payload or {})
    if not members:
        yield "The payload has no schema." if event_type.payload is None else "The schema has no fields."
        return
    yield "| field | type | required | |"
    yield "|---|---|---|---|"
    for field in members:
        required = "yes" if field.required else ""
        yield f"| {_code(field.name)} | {_cell(field.kind)} | {required} | {_cell(field.description)} |"


def _text(words: str) -> str:
    """Return the words with all markup escaped."""
    return re.sub(r"([\\`*_\[\]<>~#])", r"\\\1", " ".join(words.split()))


def _cell(words: str) -> str:
    return _text(words).replace("|", "\\|")


def _code(name: str) -> str:
    return f"`{' '.join(name.split()).replace('`', chr(39))}`".replace("|", "\\|")


def _anchor(name: str) -> str:
    """Return the anchor that GitHub makes for a heading, so that links work there too."""
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
