"""Writers: threads that do business until they are stopped, here or in a process that can be killed.

As a program: ``python -m tests.history.writers DSN SEED THREADS [SIZES PAUSE KEYS]`` prints ``writing`` and
writes until it is killed. With SIZES, PAUSE (most seconds between two transactions) and KEYS ("long": some
accounts have long ones), some transactions commit in two phases.

Invariants:
- Their choices follow the seed. An unavailable database is waited for; any other failure ends them.
- Where some commit in two phases, a writer of the same seed ends what a killed one has prepared.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import psycopg

from tests.history.business import (
    ACCOUNTS,
    LONG_ACCOUNTS,
    SIZES,
    SMALL,
    Accounts,
    Sizes,
    commit_prepared,
    transact,
)

APPLICATION = "history"


class Writers:
    """Threads that write."""

    def __init__(
        self,
        dsn: str,
        seed: int,
        count: int,
        *,
        two_phases: bool = False,
        sizes: Sizes = SMALL,
        pause_seconds: float = 0.04,
        accounts: Accounts = ACCOUNTS,
    ) -> None:
        self._dsn = dsn
        self._pause_seconds = pause_seconds
        self._two_phases = two_phases
        self._sizes = sizes
        self._accounts = accounts
        self._stop = threading.Event()
        self._failed = threading.Event()
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(f"{seed} {n}",), daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them, each after its transaction; raises what went wrong in one of them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            # What it commits later is in no topic yet when the history is judged.
            assert not thread.is_alive(), "a writer has not ended in time"
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Returns when one of them has failed."""
        self._failed.wait()

    def _write(self, chance: random.Random, seed: str) -> None:
        with psycopg.connect(self._dsn, application_name=APPLICATION, connect_timeout=5) as connection:
            # Known to the whole server, hence the database in it.
            name = f"{connection.info.dbname} {seed}" if self._two_phases else ""
            if name:
                commit_prepared(connection, name)
            while not self._stop.wait(chance.uniform(0, self._pause_seconds)):
                transact(connection, chance, name, self._sizes, self._accounts)

    def _run(self, seed: str) -> None:
        chance = random.Random(seed)
        try:
            while not self._stop.wait(0.05):
                try:
                    self._write(chance, seed)
                except psycopg.errors.ProgramLimitExceeded:
                    # An OperationalError, too: a key that the database refuses is no outage.
                    raise
                except psycopg.OperationalError:
                    continue
        except Exception as error:  # noqa: BLE001 - raised by `stop`, in the thread that asks
            self._failure = error
            self._failed.set()


if __name__ == "__main__":
    dsn, seed, threads, *more = sys.argv[1:]
    given: dict[str, Any] = {}
    if more:
        given = {"two_phases": True, "sizes": SIZES[more[0]], "pause_seconds": float(more[1])}
        given["accounts"] = ACCOUNTS + LONG_ACCOUNTS if more[2] == "long" else ACCOUNTS
    writers = Writers(dsn, int(seed), int(threads), **given)
    print("writing", flush=True)
    writers.wait()
    writers.stop()
