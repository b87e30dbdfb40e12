"""Runs a step of `outbox adopt`, and kills itself with SIGKILL before the n-th statement.

Usage: python -m tests.existing.adopt.dying, settings in the environment. For each line `N STEP` of
its standard input it forks a process that dies so, and answers with its wait status; 0: the step came to its
end. Of the statements of a relay, which has tests of its own, one in ten counts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any

# Imported before the forks: `finish` imports it when it proves a file.
import duckdb  # noqa: F401
import psycopg

from outbox_pipelines.existing.adopt import steps
from outbox_pipelines.existing.adopt.drain import Rest
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings
from tests import forks

_STATEMENT, _STATEMENT_OF_A_RELAY = 10, 1

_left = 0
_weight = _STATEMENT
_lock = threading.Lock()


def _counted(execute: Any) -> Any:
    def run(*given: Any, **named: Any) -> Any:
        global _left
        with _lock:
            _left -= _weight
            if _left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return execute(*given, **named)

    return run


def _relay(*given: Any, **named: Any) -> Any:
    global _weight
    _weight = _STATEMENT_OF_A_RELAY
    try:
        return _relay_itself(*given, **named)
    finally:
        _weight = _STATEMENT


_relay_itself = service.relay


def _silent(_: str) -> None: ...


def _live(step: str) -> None:
    settings = load_settings()
    for owner, name in (
        (psycopg.Connection, "execute"),
        (psycopg.Transaction, "__enter__"),
        (psycopg.Transaction, "__exit__"),
    ):
        setattr(owner, name, _counted(getattr(owner, name)))
    service.relay = _relay
    if step == "prepare":
        steps.prepare(settings)
    elif step == "switch":
        steps.switch(settings, [], seconds=30, say=_silent)
    elif step == "finish":
        steps.finish(settings, drop=True, seconds=30, say=_silent)
    elif step == "drain-rest":
        steps.drain(settings, seconds=60, say=_silent, rest=Rest.PUBLISH)
    elif step == "drain":
        steps.drain(settings, seconds=60, say=_silent)
    else:
        steps.back(settings, seconds=60, say=_silent)


def main() -> None:
    global _left
    parent = os.getpid()
    for line in sys.stdin:
        number, step = line.split()
        child = os.fork()
        if not child:
            forks.end_with(parent)
            _left = int(number) * _STATEMENT
            try:
                _live(step)
            except BaseException:  # noqa: BLE001 - the test sees it as a status
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
