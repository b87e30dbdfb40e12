"""The consumers that a reconciliation compares."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_pipelines.errors import SetupError
from outbox_pipelines.parsers.consumers_file import Consumer, read_consumers
from outbox_pipelines.settings import Settings


def chosen(settings: Settings, names: Sequence[str]) -> list[Consumer]:
    """Those of the settings that are named; all without any name.

    Raises:
        SetupError: there is none of this name.
    """
    known = read_consumers(settings.consumers_file) if settings.consumers_file else {}
    for name in names:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "it names none"
            raise SetupError(f"no consumer is named {name!r}: {there} (the file of OUTBOX_CONSUMERS_FILE)")
    return [known[name] for name in names or known]
