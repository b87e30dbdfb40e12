"""The names of Dagster that are not public and that these definitions need; no other file imports any.

It is imported within functions: a new version that moves a name takes one job with it, not all definitions.

Checked with the versions of `CHECKED`: a test fails when the installed one is another, so that whoever raises
it looks here first.
"""

from dagster._core.definitions.run_request import InstigatorType
from dagster._core.instance.utils import RUNLESS_RUN_ID
from dagster._core.storage.asset_check_execution_record import (
    COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES as COMPLETED_CHECK_STATUSES,
)
from dagster._core.storage.event_log import SqlEventLogStorage

CHECKED = ("1.13",)
"""Versions of Dagster, as major.minor."""

__all__ = [
    "CHECKED",
    "COMPLETED_CHECK_STATUSES",
    "RUNLESS_RUN_ID",
    "InstigatorType",
    "SqlEventLogStorage",
]
