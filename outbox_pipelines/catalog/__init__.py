"""The event catalog: the meaning, producer, consumers and payload schema of each event type.

It is a YAML file that OUTBOX_CATALOG_FILE names. `outbox catalog` compares it with the table and renders it
as a page; with `validator`, the writer rejects events that the catalog does not allow:

    validate_with(validator("catalog.yaml"))          # of outbox_pipelines.writer, once, when you start
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal


def validator(
    path: Path | str, *, unknown: Literal["refuse", "pass"] = "refuse"
) -> Callable[[str, object, int | None], None]:
    """Return a function that checks event type, payload (plain JSON) and version against the event catalog.

    The file is read once, by this call. A type without a schema accepts any payload. A retired type is always
    rejected, and so is a version that is not listed, if the type has `versions`. Formats (``date-time``,
    ``email``, ``uuid`` …) are checked. The result is thread-safe.

    Args:
        path: the file of the event catalog.
        unknown: whether to reject or accept an event type that is not documented.

    Raises:
        SetupError: the file is not a valid event catalog; the message says what to correct.

    The result raises `ValueError`; its message names the place in the payload and the problem.
    """
    # Here, because `outbox` loads this package for each of its commands.
    from outbox_pipelines.catalog.document import compiled, read_catalog
    from outbox_pipelines.errors import SetupError

    try:
        catalog = read_catalog(Path(path))
    except ValueError as error:
        raise SetupError(f"{path}: {error}") from None
    return compiled(catalog, refuses_unknown=unknown == "refuse")
