"""Whether the files of TLS that the settings name for a schema registry can be used."""

from __future__ import annotations

import re
import ssl
from typing import Final

from outbox_pipelines.config import fields
from outbox_pipelines.core.secret import first_line

FILES: Final = {
    "registry_ca": "ssl.ca",
    "registry_certificate": "ssl.certificate",
    "registry_key": "ssl.key",
}
"""The settings that name files of TLS, and what Confluent's client calls each."""
_CERTIFICATE: Final = re.compile(rb"-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----")
# The second line of an older form says that it is encrypted.
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(\s+Proc-Type: 4,ENCRYPTED)?")


def unusable_files(settings: fields.Registry) -> list[tuple[str, str]]:
    """Return the settings of TLS whose files cannot be used, each with the reason and the remedy."""
    found: list[tuple[str, str]] = []
    texts: dict[str, bytes] = {}
    for name in FILES:
        path = getattr(settings, name)
        # Certificates of authorities may be in a directory.
        if path is None or (name == "registry_ca" and path.is_dir()):
            continue
        try:
            texts[name] = path.read_bytes()
        except OSError as error:
            found.append((name, f"{path} cannot be read: {error.strerror}: correct the path or its rights"))
    for name in ("registry_ca", "registry_certificate"):
        if name in texts and not _CERTIFICATE.search(texts[name]):
            found.append((name, f"{getattr(settings, name)} has no certificate: name a file in PEM"))
    holder = "registry_certificate" if settings.registry_key is None else "registry_key"
    if holder in texts:
        file = getattr(settings, holder)
        if not (begin := _PRIVATE_KEY.search(texts[holder])):
            also = "" if settings.registry_key else ", or set OUTBOX_REGISTRY_KEY"
            found.append((holder, f"{file} has no private key: name a file in PEM that has one{also}"))
        elif b"ENCRYPTED" in begin.group():
            found.append((holder, f"{file} is encrypted: decrypt it with `openssl pkey -in … -out …`"))
    if found:
        return found
    context, name = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "registry_ca"
    try:
        if name in texts:
            context.load_verify_locations(settings.registry_ca)
        name = holder
        if settings.registry_certificate is not None:
            context.load_cert_chain(settings.registry_certificate, settings.registry_key, password="")
    except (OSError, ValueError) as error:
        return [(name, f"{getattr(settings, name)}: {first_line(error)}: name a valid file")]
    return []
