"""The addresses of a Kafka Connect cluster: OUTBOX_CONNECT."""

from __future__ import annotations

from urllib.parse import urlsplit

_WRITE = "write http://host:8083, for several workers separated by commas"


def connect_urls(text: str) -> list[str]:
    """Return the addresses of workers.

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
            raise ValueError(
                f"is not the address of Kafka Connect's REST: {_WRITE}. Special characters of a password "
                "are % and two hexadecimal digits (%2C for a comma, %40 for @)"
            )
        if parts.query or parts.fragment:
            raise ValueError(f"has more than an address: {_WRITE}; %3F for ? and %23 for # in a password")
    return urls
