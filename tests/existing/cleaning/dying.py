"""Runs clean-ups that kill themselves with SIGKILL before their n-th statement or change of the archive.

Usage: python -m tests.existing.cleaning.dying, settings in the environment. For each line `N` of its
standard input it forks a process that dies so, and answers with its wait status; 0: the clean-up came to its
end.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any

# Imported before the forks: the clean-up imports them when it writes and proves the first file.
import duckdb  # noqa: F401
import pandas  # noqa: F401
import psycopg
import pyarrow.parquet  # noqa: F401

from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.existing.cleaning.clean_up import clean
from outbox_pipelines.settings import load_settings
from tests import forks

_left = 0


def _counted(call: Any) -> Any:
    def run(*given: Any, **named: Any) -> Any:
        global _left
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)

    return run


def main() -> None:
    global _left
    for owner, name in (
        (psycopg.Connection, "execute"),
        (psycopg.Transaction, "__exit__"),
        (Store, "adopt"),
        (Store, "rename"),
    ):
        setattr(owner, name, _counted(getattr(owner, name)))
    parent = os.getpid()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            forks.end_with(parent)
            _left = int(line)
            try:
                clean(load_settings())
            except BaseException:  # noqa: BLE001 - the test sees it as a status
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
