"""What Dagster loads: every definition in `defs/`."""

import dagster as dg

from outbox_pipelines import defs as folder
from outbox_pipelines.defs.resources import OutboxResource


@dg.definitions
def defs() -> dg.Definitions:
    """Not `load_from_defs_folder`: that one needs a pyproject.toml, which an installed package has not."""
    return dg.load_definitions_from_package_module(
        folder,
        resources={"outbox": OutboxResource()},
        # A process for each step costs twice the CPU of a run, and no job here gains by it.
        executor=dg.in_process_executor,
    )
