"""The catalogue of event types: what each one means, who writes it, who reads it, and what its payload has.

A YAML file of yours, named by OUTBOX_CATALOG_FILE. `outbox catalog` compares it with the table and makes a
page of it; `validator` makes the writer refuse what it does not allow:

    validate_with(validator("catalog.yaml"))          # of outbox_pipelines.writer, once, when you start
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal


def validator(
    path: Path | str, *, unknown: Literal["refuse", "pass"] = "refuse"
) -> Callable[[str, object], None]:
    """What compares an event type and its payload, as plain JSON, with the catalogue in a file.

    The file is read here, once. A type without a schema passes with any payload; a retired one never.
    Formats (``date-time``, ``email``, ``uuid`` …) are checked. The result may be called by several threads.

    Args:
        path: the catalogue.
        unknown: what becomes of an event type that is not documented.

    Raises:
        SetupError: it is no catalogue; the message says what to mend.

    The result raises `ValueError`, whose message says where in the payload, and what is wrong there.
    """
    # Here, because `outbox` loads this package for each of its commands.
    from outbox_pipelines.catalog.document import read_catalog
    from outbox_pipelines.catalog.validation import compiled
    from outbox_pipelines.errors import SetupError

    try:
        catalog = read_catalog(Path(path))
    except ValueError as error:
        raise SetupError(f"{path}: {error}") from None
    return compiled(catalog, refuses_unknown=unknown == "refuse")
