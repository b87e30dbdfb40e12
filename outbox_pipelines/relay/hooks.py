"""Tells people of a dead letter: an error in the log, a metric, and the command that the operator named.

Invariants:
- Nothing here holds the relay up, or fails it: the table has the dead letter in any case.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from typing import Any, Final

from outbox_pipelines.relay.metrics import Metrics
from outbox_pipelines.relay.retries import DeadLetter
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
_COMMAND_SECONDS: Final = 30.0
# Commands at once: a thousand dead letters must not start a thousand processes.
_slots = threading.BoundedSemaphore(4)


def dead_letter(settings: Settings, metrics: Metrics, letter: DeadLetter) -> None:
    """Reports it; returns at once."""
    metrics.dead_lettered()
    _LOG.error(
        "dead letter: %s, after %d attempts: %s",
        letter.event,
        letter.attempts,
        letter.error,
        extra=_fields(letter),
    )
    if settings.dead_letter_command:
        arguments = (settings.dead_letter_command, describe(settings, letter))
        # Not a daemon: a relay that ends lets its last alarm go out.
        threading.Thread(target=_run, args=arguments, name="outbox-hook").start()


def describe(settings: Settings, letter: DeadLetter) -> str:
    """A dead letter as one JSON object, without its payload."""
    is_ours = settings.table is None
    remedy = f"outbox dead-letters show {letter.event.id}" if is_ours else "mend the row, make it pending"
    return json.dumps({"kind": "dead-letter", **_fields(letter), "help": remedy})


def _fields(letter: DeadLetter) -> dict[str, Any]:
    event = letter.event
    return {
        "id": event.id,
        "seq": event.seq,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "event_type": event.event_type,
        "attempts": letter.attempts,
        "error": letter.error,
    }


def _run(command: str, description: str) -> None:
    with _slots:
        try:
            subprocess.run(
                command, shell=True, input=description, text=True, check=True, timeout=_COMMAND_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            _LOG.error("OUTBOX_DEAD_LETTER_COMMAND failed: %s", error)
