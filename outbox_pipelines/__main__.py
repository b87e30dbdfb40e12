"""The command `outbox`; also `python -m outbox_pipelines`."""

from __future__ import annotations

import sys
from typing import Final

# Of the packages that a command needs, by the command's name; all others need those of the relay.
_EXTRAS: Final = {"lint-writes": "lint", "consumer": "consumer"}


def main() -> None:
    """Entry point of the console script."""
    asked = next(iter(sys.argv[1:]), "")
    try:
        if asked == "lint-writes":
            # In a pipeline that has neither drivers nor settings.
            from outbox_pipelines.cli.lint_writes import lint_writes

            lint_writes(sys.argv[2:], prog_name="outbox lint-writes")
        from outbox_pipelines.cli.main import cli
    except ModuleNotFoundError as error:
        # The package alone is the writer, which is all that an application needs.
        if (error.name or "").startswith("outbox_pipelines"):
            raise
        extra = _EXTRAS.get(asked, "relay")
        sys.exit(f"outbox: {error.name} is not installed: pip install 'outbox-pipelines[{extra}]'")
    cli(prog_name="outbox")


if __name__ == "__main__":
    main()
