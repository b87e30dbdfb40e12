"""A code location that has outboxes and nothing else: the environment's, or those of `outbox.toml`.

Beside definitions of your own, call `outbox_pipelines.defs.outbox_definitions` and merge what it returns.
"""

import dagster as dg

from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.build import served

# An object, not a function with Dagster's decorator: in a module that imports such a function, Dagster loads
# that one and ignores the module's own definitions without an error. Two objects are an error.
defs = dg.Definitions.merge(
    outbox_definitions(*served()),
    # Of runs of chosen assets, which are no job's. A code location of a user's has its own.
    dg.Definitions(executor=dg.in_process_executor),
)
