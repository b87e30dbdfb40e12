"""The scopes that are explored, by name."""

from __future__ import annotations

from typing import Final

from tests.model.consumer.scopes import CONSUMER
from tests.model.marked.scopes import SCOPES as MARKED
from tests.model.relay.scopes import SCOPES as RELAY
from tests.model.scope import Scope

SCOPES: Final[dict[str, Scope]] = {**RELAY, **MARKED, **CONSUMER}
