"""Writers: threads that do business until they are stopped, here or in a process that can be killed.

As a program: ``python -m tests.history.writers DSN SEED THREADS`` prints ``writing`` and writes until it is
killed.

Invariants:
- Their choices follow the seed. A database that is away is waited for; any other failure ends them.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import suppress

import psycopg

from tests.history.business import transact

APPLICATION = "history"


class Writers:
    """Threads that write."""

    def __init__(self, dsn: str, seed: int, count: int) -> None:
        self._dsn = dsn
        self._stop = threading.Event()
        self._failed = threading.Event()
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {n}"),), daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them, each after its transaction; raises what went wrong in one of them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Returns when one of them has failed."""
        self._failed.wait()

    def _run(self, chance: random.Random) -> None:
        try:
            while not self._stop.wait(0.05):
                with (
                    suppress(psycopg.OperationalError),
                    psycopg.connect(self._dsn, application_name=APPLICATION, connect_timeout=5) as connection,
                ):
                    while not self._stop.wait(chance.uniform(0, 0.04)):
                        transact(connection, chance)
        except Exception as error:  # noqa: BLE001 - raised by `stop`, in the thread that asks
            self._failure = error
            self._failed.set()


if __name__ == "__main__":
    writers = Writers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("writing", flush=True)
    writers.wait()
    writers.stop()
