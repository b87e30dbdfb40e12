"""Private names of Dagster that these definitions need; no other file imports private names.

This module is imported within functions: if a new version moves a name, one job fails, not all definitions.

Checked with the versions in `CHECKED`: a test fails if another version is installed, so that an upgrade of
Dagster starts here.
"""

from dagster import AssetsDefinition
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.instance.utils import RUNLESS_RUN_ID
from dagster._core.storage.asset_check_execution_record import (
    COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES as COMPLETED_CHECK_STATUSES,
)
from dagster._core.storage.event_log import SqlEventLogStorage

CHECKED = ("1.13",)
"""Versions of Dagster, as major.minor."""


def set_io_manager_key(definition: AssetsDefinition, key: str) -> None:
    """Set the resource that stores outputs and loads inputs, also where Dagster has no parameter for it."""
    for output in definition.node_def.output_defs:
        output._io_manager_key = key
    for needed in definition.node_def.input_defs:
        needed._input_manager_key = key


__all__ = [
    "CHECKED",
    "COMPLETED_CHECK_STATUSES",
    "RUNLESS_RUN_ID",
    "DefinitionsLoadContext",
    "DefinitionsLoadType",
    "InstigatorType",
    "SqlEventLogStorage",
    "set_io_manager_key",
]
