"""An outbox with an archive, a topic, and events of past days."""

from __future__ import annotations

from tests.reconciliation.conftest import place

__all__ = ["place"]
