"""A stop by a signal, in the moment in which the main thread holds the lock of the stop event."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
# As if it came between two steps of `stop.wait()`, or of another signal's handler.
_MEANWHILE = """
    with stop._cond:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(600)
"""


@pytest.mark.parametrize("program", [_RELAY, _CONSUMER], ids=["relay", "consumer"])
def test_a_signal_waits_for_no_lock(program: str) -> None:
    """Guards against a process that never ends, because the handler of SIGTERM waits for its own thread."""
    done = subprocess.run(
        [sys.executable, "-c", program + _MEANWHILE], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
