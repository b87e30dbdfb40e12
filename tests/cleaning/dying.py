"""Runs a clean-up that kills itself with SIGKILL before its n-th statement or change of the archive.

Usage: python -m tests.cleaning.dying N, settings in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psycopg

from outbox_pipelines.archive.store import Store
from outbox_pipelines.cleaning.clean import clean
from outbox_pipelines.settings import load_settings

_left = int(sys.argv[1]) if len(sys.argv) > 1 else 0


def _counted(call: Any) -> Any:
    def run(*given: Any, **named: Any) -> Any:
        global _left
        _left -= 1
        if not _left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)

    return run


def main() -> None:
    for owner, name in (
        (psycopg.Connection, "execute"),
        (psycopg.Transaction, "__exit__"),
        (Store, "adopt"),
        (Store, "rename"),
    ):
        setattr(owner, name, _counted(getattr(owner, name)))
    clean(load_settings())


if __name__ == "__main__":
    main()
