"""A stop by a signal, in the moment in which the main thread holds a lock, or waits for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

import psycopg
import pytest

from outbox_pipelines.core import answers
from outbox_pipelines.core.signals import until_signal
from outbox_pipelines.database import connect
from tests.conftest import Outbox, patience, wait_until

_RELAY = """
import os, signal
from outbox_pipelines.core.signals import until_signal
with until_signal() as stop:
"""
_CONSUMER = """
import os, signal, threading
from outbox_pipelines.consumer.consumer import _signals_set
stop = threading.Event()
with _signals_set(stop):
"""
_COMMAND = """
import os, signal, sys
from outbox_pipelines.__main__ import main
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "outbox_pipelines.cli.options":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
main()
"""
# As if it came between two steps of `stop.wait()`, or of another signal's handler.
_MEANWHILE = """
    with stop._cond:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(600)
"""


def test_a_signal_limits_what_a_statement_waits(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a replay that Ctrl-C does not end, since a statement of it waits for a lock."""
    monkeypatch.setattr(answers, "PATIENCE", 0.2)
    waits = "SELECT count(*) FROM pg_locks WHERE relation = 'outbox'::regclass AND NOT granted"
    with outbox.connect(autocommit=False) as other, outbox.connect() as watching:
        other.execute("LOCK TABLE outbox")
        late = threading.Timer(patience(20), other.rollback)
        late.start()

        def end() -> None:
            wait_until(lambda: watching.execute(waits).fetchone() == (1,), what="the statement to wait")
            os.kill(os.getpid(), signal.SIGTERM)

        with until_signal() as stop, closing(connect(outbox.settings, name="test")) as connection:
            threading.Thread(target=end).start()
            with pytest.raises(psycopg.OperationalError, match="after which it is not waited for"):
                connection.execute("SELECT FROM outbox")
            assert stop.is_set()
        late.cancel()


@pytest.mark.parametrize("program", [_RELAY, _CONSUMER], ids=["relay", "consumer"])
def test_a_signal_waits_for_no_lock(program: str) -> None:
    """Guards against a process that never ends, because the handler of SIGTERM waits for its own thread."""
    done = subprocess.run(
        [sys.executable, "-c", program + _MEANWHILE], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_import() -> None:
    """Guards against a traceback for Ctrl-C in a command's first moments."""
    done = subprocess.run([sys.executable, "-c", _COMMAND], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
