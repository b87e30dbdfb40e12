"""No definition of an outbox stores its outputs, or needs the I/O manager of a user.

Invariants:
- The key of the I/O manager of assets and checks is this package's own. A user's I/O manager that cannot be
  set up therefore stops no run of an outbox, and its configuration is not asked for.
"""

from __future__ import annotations

from typing import Any, Final

import dagster as dg

KEY: Final = "outbox_pipelines_io_manager"
"""Of every output of an asset or a check that is a graph of ops."""


class _Nothing(dg.IOManager):
    """Refuses to store. Not Dagster's in-memory one, which no executor with several processes accepts."""

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        if obj is not None:
            raise TypeError(f"{context.get_identifier()} has an output: outputs of an outbox are not stored")

    def load_input(self, context: dg.InputContext) -> None:
        raise TypeError(f"{context.name}: outputs of an outbox are not stored")


LOGGERS: Final = {"console": dg.colored_console_logger}
"""Dagster's default. A user's logger that cannot be set up therefore stops no run of an outbox."""
nothing: Final = dg.IOManagerDefinition.hardcoded_io_manager(_Nothing())


def detached(definition: Any) -> Any:
    """Return an asset or a check that does not need the I/O manager `io_manager`."""
    if not isinstance(definition, dg.AssetsDefinition) or not definition.is_executable:
        return definition
    # Imported here: it has private names of Dagster.
    from outbox_pipelines.defs.dagster_internals import set_io_manager_key

    set_io_manager_key(definition, KEY)
    return dg.with_resources([definition], {KEY: nothing})[0]
