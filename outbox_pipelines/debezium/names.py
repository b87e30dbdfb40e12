"""What belongs to the connector of an outbox, and how it is called."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from outbox_pipelines.debezium.router import OUTBOX, mapping, table
from outbox_pipelines.settings import Settings

REFERENCE: Final = "${env:OUTBOX_DATABASE_PASSWORD}"
"""Where workers find the database's password, if nothing else is said."""
_REFERENCE: Final = re.compile(r"\$\{[^{}:]+:[^{}]+\}")
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")


def connector_name(settings: Settings) -> str:
    """Return the name of the connector in its cluster."""
    return settings.connector or settings.name


def slot_name(settings: Settings, database: str) -> str:
    """Return the name of the slot and the publication: readable, and no other outbox's of the server."""
    schema, name = table(settings)
    is_ours = mapping(settings) is OUTBOX
    parts = ("debezium", database, schema, *([] if is_ours else [name]))
    full = "_".join(parts)
    # Otherwise the parts could not be distinguished: not only the database may contain the separator.
    if _NAME.fullmatch(full) and is_ours and "_" not in schema:
        return full
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-z0-9_]', '_', full.lower())[:54]}_{digest}"


def reference(text: str) -> str:
    """Return the reference to a password, or the empty text for none.

    Raises:
        ValueError: it is something else. The message does not show it: it may be the password.
    """
    if text and not _REFERENCE.fullmatch(text):
        raise ValueError(
            "write a reference that the workers resolve, such as "
            "'${file:/secrets/outbox.properties:password}' or '${env:NAME}', in single quotes; the password "
            "itself would be readable in Kafka Connect"
        )
    return text
