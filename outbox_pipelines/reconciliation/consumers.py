"""The consumers that a reconciliation compares."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_pipelines.config import parsed
from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings


def chosen(settings: Settings, names: Sequence[str]) -> list[Consumer]:
    """Return the consumers of the settings with these names; without names, all of them.

    Raises:
        SetupError: there is no consumer of this name.
    """
    known = parsed.consumers(settings)
    for name in names:
        if name not in known:
            there = f"there is {', '.join(known)}" if known else "there is none"
            raise SetupError(f"no consumer is named {name!r}: {there} ([consumers.NAME] in outbox.toml)")
    return [known[name] for name in names or known]
