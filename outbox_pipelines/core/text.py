"""Makes data (ids, types, errors, names of topics) safe to show: a function for each medium.

`plain` is for terminals, logs and tables, `markdown` for descriptions in Dagster, `message` for mails and
chats.

Invariants:
- Data can neither start a new line nor control a terminal: control characters, marks that change the
  direction of text, and unpaired surrogates are written as escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

# C0 and C1 (escape sequences), line and paragraph separators, bidirectional and invisible marks, surrogates.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
# What begins a link, an image, HTML or code, and what would undo its escape. An address is a link without
# markup, and no escape prevents that: it becomes code.
_MARKUP: Final = re.compile(r"(?P<address>(?:https?://|www\.)[^\s`]+)|[\\\[<`]", re.IGNORECASE)
# What chats take for a mention, a link or an image. Their escapes differ, and some have none.
_CHAT: Final = re.compile(r"<|(?<!\w)@|\](?=[(\[:])")
_HARMLESS: Final = {"<": "‹", "@": "＠", "]": "] "}
_LONGEST: Final = 200
_LONGEST_REASON: Final = 800
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def plain(text: str) -> str:
    """Return the text as one line without characters that control a terminal."""
    return _UNSAFE.sub(_escape, text)


def short(text: str) -> str:
    """Return the text for one of several columns in a line: what is too long ends with its length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def reason(error: Exception | str) -> str:
    """Return why something failed as it is stored, logged and sent: one line of some hundred characters.

    Content, such as the name of a member, can be in it. What is too long is cut in the middle.
    """
    text = plain(error if isinstance(error, str) else f"{type(error).__name__}: {error}")
    if len(text) <= _LONGEST_REASON:
        return text
    half = _LONGEST_REASON // 2
    return f"{text[:half]} … ({len(text):,} characters) … {text[-half:]}"


def plain_lines(text: str) -> str:
    """Return a text of several lines, each as `plain` returns it."""
    return "\n".join(map(plain, text.split("\n")))


def markdown(text: str) -> str:
    """Return the text as one line for a page that renders Markdown: no link, image or HTML begins in it."""
    return _MARKUP.sub(lambda found: f"`{found[0]}`" if found["address"] else f"\\{found[0]}", plain(text))


def message(text: str) -> str:
    """Return the text for mails and chats: one line without mentions, images, and links with a text.

    What begins one is replaced by a similar character.
    """
    return _CHAT.sub(lambda found: _HARMLESS[found[0]], plain(text))


def to_json(value: Any, *, indent: int | None = None, **more: Any) -> str:
    """Return readable JSON: letters unchanged, characters that control a terminal as escapes.

    A value that is nested too deeply for Python to write is replaced by a note.
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, **more)
    except RecursionError:
        if not isinstance(value, dict):
            return '"(nested too deeply to be shown)"'
        parts = {name: _flat(part, **more) for name, part in value.items()}
        text = json.dumps(parts, indent=indent, ensure_ascii=False, **more)
    # Outside strings, the line breaks of an indent are the only such characters in JSON.
    return _UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def _flat(value: Any, **more: Any) -> Any:
    try:
        json.dumps(value, indent=1, **more)
    except RecursionError:
        return "(nested too deeply to be shown)"
    return value


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 dead letter`, `2 dead letters`, or with the plural given."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(count: float | None) -> str:
    """Return a number of bytes for people."""
    if count is None:
        return "unknown"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} bytes"
