"""Reports dead letters: an error in the log for those that are alike, and a metric for each.

Invariants:
- Nothing here delays the relay or makes it fail: the table has the dead letter in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from outbox_pipelines.core.repeated_lines import RepeatedLines
from outbox_pipelines.relay.core.attempts import DeadLetter
from outbox_pipelines.relay.parking.notify import fields
from outbox_pipelines.relay.telemetry.metrics import Metrics

_LOG = logging.getLogger(__name__)


def reporter(metrics: Metrics) -> Callable[[DeadLetter], None]:
    """Return what reports a dead letter, and returns immediately."""
    lines = RepeatedLines(_LOG)

    def report(letter: DeadLetter) -> None:
        metrics.dead_lettered()
        event = letter.event
        lines.log(
            (event.aggregate_type, event.event_type, letter.error),
            "dead letter: %s, after %d attempts: %s",
            event,
            letter.attempts,
            letter.error,
            level=logging.ERROR,
            extra=fields(event, letter.attempts, letter.error),
        )

    return report
