"""The command `outbox`; also `python -m outbox_pipelines`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from outbox_pipelines.cli import cli
    except ModuleNotFoundError as error:
        # The package alone is the writer, which is all that an application needs.
        if (error.name or "").startswith("outbox_pipelines"):
            raise
        sys.exit(f"outbox: {error.name} is not installed: pip install 'outbox-pipelines[relay]'")
    cli(prog_name="outbox")


if __name__ == "__main__":
    main()
