"""Master keys as settings have them: base64, separated by spaces; the first is the current one."""

from __future__ import annotations

import base64
from typing import Final

SIZE: Final = 32
"""Bytes of a key of AES-256."""


def read_master_keys(text: str) -> list[bytes]:
    """Return the keys; raise `ValueError`, without repeating the text, if one is invalid."""
    keys = []
    for number, word in enumerate(text.split(), 1):
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
