"""An encrypted value as it is in a payload: a text, so that schemas and every format carry it.

    outbox-encrypted:1:<key id>:<base64url, without =, of nonce (12 bytes), ciphertext and tag (16 bytes)>

Invariants:
- AES-256-GCM of the value's JSON text; what is before the base64url is authenticated, too.
- A text that begins so and has another shape was changed: it is never taken for clear text.
- In a JSON text, what is replaced is exactly a value: no other byte changes, so numbers keep their digits.
"""

from __future__ import annotations

import json
import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outbox_pipelines.core.erased import ERASED

PREFIX: Final = "outbox-encrypted:"
COMMON: Final = "outbox-e"
"""How both texts begin, the encrypted one and `ERASED`: asked first, because it costs little."""
_VERSION: Final = f"{PREFIX}1:"
_UUID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# A nonce, a tag and one byte at least.
_SHAPE: Final = re.compile(rf"({_VERSION}({_UUID}):)([A-Za-z0-9_-]{{39,}})")
# Between two strings of JSON there is neither a letter nor a backslash: what follows the quote is a string's
# begin. One before a colon is the name of a member.
_IN_JSON: Final = re.compile(rf'(?<!\\)"({_VERSION}{_UUID}:[A-Za-z0-9_-]{{39,}}|{ERASED})"(?!\s*:)')
_ANY_IN_JSON: Final = re.compile(rf'(?<!\\)"{PREFIX}')
_NONCE: Final = 12


def has_any(text: str) -> bool:
    """Return whether JSON has a string that begins as an encrypted value does."""
    return _ANY_IN_JSON.search(text) is not None


def sealed(key_id: str, key: AESGCM, value: object) -> str:
    """Return a JSON value as encrypted text."""
    begin = f"{_VERSION}{key_id}:"
    nonce = os.urandom(_NONCE)
    content = nonce + key.encrypt(nonce, json.dumps(value, ensure_ascii=False).encode(), begin.encode())
    return begin + urlsafe_b64encode(content).rstrip(b"=").decode()


def opened(text: str, key: AESGCM) -> tuple[str, Any] | None:
    """Return an encrypted value as JSON text and as it is; None if it is not JSON encrypted with this key."""
    if (found := _SHAPE.fullmatch(text)) is None:
        return None
    try:
        content = urlsafe_b64decode(found[3] + "==")
        value = key.decrypt(content[:_NONCE], content[_NONCE:], found[1].encode()).decode()
        return value, json.loads(value)
    except (InvalidTag, ValueError, RecursionError):
        return None


def key_id_of(text: str) -> str | None:
    """Return the id of the key of an encrypted value; None if the text has not its shape."""
    found = _SHAPE.fullmatch(text)
    return found[2] if found else None


def replaced(value: Any, replace: Callable[[str], Any]) -> Any:
    """Return a copy of a value with each text in it replaced that begins as an encrypted or erased one does.

    Without recursion: JSON can be nested as deeply as it can be read.
    """
    copy = [value]
    containers: list[Any] = [copy]
    while containers:
        container = containers.pop()
        for name, each in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(each, str):
                if each.startswith(COMMON):
                    container[name] = replace(each)
            elif isinstance(each, dict | list):
                container[name] = each.copy()
                containers.append(container[name])
    return copy[0]


def replaced_in_json(text: str, replace: Callable[[str], str]) -> str:
    """Return a JSON text with each encrypted or erased value in it replaced by other JSON."""
    return _IN_JSON.sub(lambda found: replace(found[1]), text)
