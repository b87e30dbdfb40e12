"""Lists of addresses of one HTTP server: OUTBOX_CONNECT and OUTBOX_REGISTRY_URL."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit


def connect_urls(text: str) -> list[str]:
    """Return the addresses of the workers of Kafka Connect.

    Raises:
        ValueError: the text has something else; the message does not repeat it.
    """
    write = "write http://host:8083, for several workers separated by commas"
    no_address = (
        f"is not the address of Kafka Connect's REST: {write}. Special characters of a password "
        "are % and two hexadecimal digits (%2C for a comma, %40 for @)"
    )
    return [url for url, _ in _urls(text, write, no_address, "; %3F for ? and %23 for # in a password")]


def registry_urls(text: str) -> list[str]:
    """Return the addresses of a schema registry.

    Raises:
        ValueError: the text has something else; the message does not repeat it.
    """
    write = "write https://registry:8081, for several addresses of one registry separated by commas"
    found = [*_urls(text, write, f"is not the address of a schema registry: {write}")]
    if any("@" in parts.netloc for _, parts in found):
        raise ValueError("has a user in it: remove it, and write user:password to OUTBOX_REGISTRY_USER_INFO")
    return [url for url, _ in found]


def _urls(text: str, write: str, no_address: str, escapes: str = "") -> Iterator[tuple[str, SplitResult]]:
    urls = [part.strip() for part in text.split(",") if part.strip()]
    if not urls:
        raise ValueError(f"has no address: {write}")
    for url in urls:
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one or any(ord(character) <= 32 for character in url):
            raise ValueError(no_address)
        if parts.query or parts.fragment:
            raise ValueError(f"has more than an address: {write}{escapes}")
        yield url, parts
