"""Reports a dead letter: an error in the log, and a metric.

Invariants:
- Nothing here delays the relay or makes it fail: the table has the dead letter in any case.
"""

from __future__ import annotations

import logging

from outbox_pipelines.relay.core.attempts import DeadLetter
from outbox_pipelines.relay.parking.notify import fields
from outbox_pipelines.relay.telemetry.metrics import Metrics

_LOG = logging.getLogger(__name__)


def dead_letter(metrics: Metrics, letter: DeadLetter) -> None:
    """Report a dead letter; return immediately."""
    metrics.dead_lettered()
    _LOG.error(
        "dead letter: %s, after %d attempts: %s",
        letter.event,
        letter.attempts,
        letter.error,
        extra=fields(letter.event, letter.attempts, letter.error),
    )
