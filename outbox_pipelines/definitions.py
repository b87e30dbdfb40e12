"""What Dagster loads: everything in `defs/`."""

from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    """Finds `defs/` by the [tool.dg] of the pyproject.toml above it; a wheel carries a copy for that."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
