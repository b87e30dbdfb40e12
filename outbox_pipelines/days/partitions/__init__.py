"""The days of the outbox: one partition each, created ahead of time."""

from __future__ import annotations

from typing import Final

FEW_AHEAD: Final = 7
"""With fewer days ahead an operator must act: maintenance has failed for a week."""
