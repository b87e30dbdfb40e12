"""The Dagster definitions. They are thin: the other packages do the work.

Invariants:
- Every definition is named in `outbox_definitions`; importing a module loads no driver, client or pandas:
  what needs them is imported in the function that runs.
- The description of every asset, job and sensor says what it does, when to use it, and what to do when it
  fails.
- Merged into a user's definitions, they change nothing there: they add no executor and no resource, and
  nothing starts unless asked for.
- Definitions load whatever is wrong with an outbox, its settings or its database: its sensors and runs
  report it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dagster as dg

    from outbox_pipelines.defs.archive import ArchiveResource as ArchiveResource
    from outbox_pipelines.defs.component import OutboxComponent as OutboxComponent
    from outbox_pipelines.defs.component import OutboxesOverview as OutboxesOverview
    from outbox_pipelines.defs.outbox import Outbox as Outbox

_PLACES = {
    "ArchiveResource": "archive",
    "Outbox": "outbox",
    "OutboxComponent": "component",
    "OutboxesOverview": "overview_component",
}

__all__ = ["ArchiveResource", "Outbox", "OutboxComponent", "OutboxesOverview", "outbox_definitions"]


def __getattr__(name: str) -> object:
    # Every module of this package imports this one first; Dagster takes a second to import.
    if name not in _PLACES:
        raise AttributeError(name)
    return getattr(import_module(f"outbox_pipelines.defs.{_PLACES[name]}"), name)


def outbox_definitions(*outboxes: Outbox) -> dg.Definitions:
    """Return all definitions of one or several outboxes, for a separate code location or to merge with yours.

    Args:
        outboxes: default: the outbox of the environment. Several share one sensor of each kind, and have the
            overview asset `outboxes`.

    Example:
        ```python
        orders = Outbox(name="orders", dsn_variable="ORDERS_DSN")
        defs = dg.Definitions.merge(outbox_definitions(orders), dg.Definitions(assets=[...]))
        ```
    """
    from outbox_pipelines.defs.build import build
    from outbox_pipelines.defs.outbox import Outbox

    return build(outboxes or (Outbox(),))
