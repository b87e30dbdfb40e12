"""The addresses of a schema registry: OUTBOX_REGISTRY_URL."""

from __future__ import annotations

from urllib.parse import urlsplit

_WRITE = "write https://registry:8081, for several addresses of one registry separated by commas"


def registry_urls(text: str) -> list[str]:
    """Return the addresses.

    Raises:
        ValueError: the text has something else; the message does not repeat it.
    """
    urls = [part.strip() for part in text.split(",") if part.strip()]
    if not urls:
        raise ValueError(f"has no address: {_WRITE}")
    for url in urls:
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one or any(ord(character) <= 32 for character in url):
            raise ValueError(f"is not the address of a schema registry: {_WRITE}")
        if "@" in parts.netloc:
            raise ValueError(
                "has a user in it: remove it, and write user:password to OUTBOX_REGISTRY_USER_INFO"
            )
        if parts.query or parts.fragment:
            raise ValueError(f"has more than an address: {_WRITE}")
    return urls
