"""What a run of a relay heeds and reports to, whatever it relays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from outbox_pipelines.relay.core.attempts import DeadLetter
from outbox_pipelines.relay.host import Host
from outbox_pipelines.relay.ownership import Ownership
from outbox_pipelines.relay.shard import Settled
from outbox_pipelines.relay.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The arguments of `service.relay` that its workers share: after an outage, the next one has the same."""

    stop: threading.Event
    """Set from outside, or by a worker that hands over."""
    until_empty: bool
    """Whether to publish what is committed at the start, and end."""
    hand_over_after: float | None
    on_progress: Callable[[Settled], None]
    on_dead_letter: Callable[[DeadLetter], None]
    metrics: Metrics
    host: Host

    def must_hand_over(self, owned: Ownership, since: float) -> bool:
        """Return whether to pass on what is owned since then. Asked often, in the thread of its session."""
        if self.stop.is_set():
            return False
        is_over = (
            self.hand_over_after is not None
            and time.monotonic() - since >= self.hand_over_after
            # Without a successor the relay continues: the process that starts relays may have crashed.
            and owned.is_awaited()
        )
        return is_over or self.host.must_hand_over(owned)
