"""An outbox with an archive, a topic, and events of past days."""

from __future__ import annotations

from tests.reconciliation.conftest import place
from tests.registry import registry
from tests.relay.conftest import killable, own_servers

__all__ = ["killable", "own_servers", "place", "registry"]
