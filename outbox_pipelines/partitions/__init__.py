"""The days of the outbox: a partition each, made ahead."""

from __future__ import annotations

from typing import Final

FEW_AHEAD: Final = 7
"""With fewer days ahead somebody must look: maintenance has failed for a week."""
