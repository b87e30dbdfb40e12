"""Master keys as settings have them, separated by spaces: base64, or `module:name` of a service's hook."""

from __future__ import annotations

import base64
import re
from typing import Final

from outbox_pipelines.core.secret import register

SIZE: Final = 32
"""Bytes of a key of AES-256."""
_HOOK: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def read_master_keys(text: str) -> list[bytes | str]:
    """Return keys and names of hooks; raise `ValueError`, without repeating the text, if one is invalid."""
    keys: list[bytes | str] = []
    words = text.split()
    register(*(word for word in words if not _HOOK.fullmatch(word)))
    for number, word in enumerate(words, 1):
        if _HOOK.fullmatch(word):
            keys.append(word)
            continue
        try:
            key = base64.b64decode(word, validate=True)
        except ValueError:
            key = b""
        if len(key) != SIZE:
            raise ValueError(
                f"key {number} is not base64 of {SIZE} bytes: `outbox keys generate` prints a new one; write "
                "several with spaces between them"
            )
        keys.append(key)
    return keys
