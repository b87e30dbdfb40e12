"""Lives a day's life, and kills itself with SIGKILL before the n-th statement.

Usage: python -m tests.days.partitions.dying, settings in the environment. For each line `N DAY DIRECTORY` of
its standard input it forks a process that dies so, and answers with its wait status; 0: it came to its end.
With N = 0 the process stops before each statement, says `stopped`, and continues after an empty line.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import date
from typing import Any, Final

import psycopg

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop, export, store
from outbox_pipelines.days.partitions import calendar, close
from outbox_pipelines.settings import load_settings
from tests import forks

STOPPING: Final = 0
STOPPED: Final = "stopped"

_left = 0
_is_stopping = False


def _counted(execute: Any) -> Any:
    def run(*given: Any, **named: Any) -> Any:
        global _left
        if _is_stopping:
            print(STOPPED, flush=True)
            # Not with sys.stdin, whose buffer the parent has too.
            os.read(0, 1)
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(*given, **named)

    return run


def _live(day: date, directory: str) -> None:
    settings = load_settings(archive=directory)
    # Begin and end of a transaction count too, and so do rows that are being read and writes to the archive.
    for owner, name in (
        (psycopg.Connection, "execute"),
        (psycopg.Transaction, "__enter__"),
        (psycopg.Transaction, "__exit__"),
        (export._Writer, "write"),
        (export._Writer, "__exit__"),
        (store.Store, "write"),
        (store.Store, "adopt"),
        (store, "sync"),
    ):
        setattr(owner, name, _counted(getattr(owner, name)))
    if ("dropped", day) in [(each.state, each.day) for each in calendar.read(settings)]:
        return
    close.close(settings, day)
    archive.archive(settings, day)
    archive.verify(settings, day)
    drop.drop(settings, day)


def main() -> None:
    global _left, _is_stopping
    parent = os.getpid()
    for line in sys.stdin:
        number, day, directory = line.rstrip("\n").split(" ", 2)
        child = os.fork()
        if not child:
            forks.end_with(parent)
            _left = int(number)
            _is_stopping = _left == STOPPING
            _live(date.fromisoformat(day), directory)
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
