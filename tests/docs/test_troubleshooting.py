"""docs/troubleshooting.md shows messages that are really printed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Printed by PostgreSQL.
OTHERS = {
    'no partition of relation "outbox" found for row',
    "permission denied for table outbox",
    'relation "outbox" does not exist',
    "function outbox_emit(…) does not exist",
}


def texts() -> Iterator[str]:
    """What the code can print, with … for values."""
    for path in (ROOT / "outbox_pipelines").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]", "…", node.value).replace("{}", "…")
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                )
    for path in (ROOT / "sql").rglob("*.sql"):
        yield path.read_text().replace("%", "…")


def test_the_messages_are_printed() -> None:
    """Guards against a symptom that cannot be found, because the wording of the message has changed."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    # What is seen stands before the first colon outside of a message.
    seen = re.findall(r"^- ((?:`[^`]*`|[^`:])+): ", page, re.MULTILINE)
    messages = {
        span for symptom in seen for span in re.findall(r"`([^`]{25,})`", symptom) if " " in span
    } - OTHERS
    assert len(messages) > 15
    printed = {re.sub(r"…+", "…", text) for text in texts()}
    everything = "\n".join(printed)
    parts = {message: [part for part in message.split("…") if len(part) > 3] for message in messages}
    assert {
        message for message, found in parts.items() if not all(part in everything for part in found)
    } == set()
