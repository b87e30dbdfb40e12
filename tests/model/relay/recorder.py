"""Put tapes into the relays that this process makes.

Invariants:
- Of each relay two threads are recorded, each on a tape of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outbox_pipelines.relay import worker
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.retries import Retries
from outbox_pipelines.relay.core.settler import Settler
from tests.model.relay.settling_tape import SettlingRecording
from tests.model.relay.tape import Recording


class Recorder:
    """The tapes of relays, in the order in which these were made.

    Args:
        put: sets an attribute of a module.
        limit: how many entries of each tape are recorded, about; None: all.
    """

    def __init__(self, put: Callable[[Any, str, Any], None] = setattr, limit: int | None = None) -> None:
        self.publishing: list[Recording] = []
        self.settling: list[SettlingRecording] = []
        self._limit = limit
        self._starts: list[Any] = []
        self._make_publisher = worker.make_publisher
        put(worker, "make_publisher", self._publisher)
        put(worker, "Flow", self._flow)
        put(worker, "Retries", self._retries)
        put(worker, "Settler", self._settler)

    @property
    def recordings(self) -> list[Recording | SettlingRecording]:
        """All that are not played: first those of the publishing threads."""
        return [*self.publishing, *self.settling]

    def play(self) -> int:
        """Play every tape to the core, and forget it; return the number of entries.

        Raises:
            DifferentError: it does something else than it did.
        """
        recordings = self.recordings
        self.publishing.clear()
        self.settling.clear()
        for recording in recordings:
            recording.play()
        return sum(recording.tape.at for recording in recordings)

    def _publisher(self, settings: Any, shard: Any, producer: Any, blocked: Any) -> Publisher:
        self._starts.append((shard.position, shard.tick_id))
        return self._make_publisher(settings, shard, producer, blocked)

    def _flow(
        self,
        publisher: Publisher,
        *ports: Any,
        until_empty: bool,
        on_complete: Any,
        report_poll: float,
        **more: Any,
    ) -> Flow:
        recording = Recording(publisher, until_empty=until_empty, limit=self._limit)
        start = self._starts.pop()
        if hasattr(publisher, "_tick"):
            recording.begins_at = start
        self.publishing.append(recording)
        names = ("batches", "ledger", "blocked", "retries", "crash_guard")
        real = dict(zip(names, ports, strict=True)) | more
        flags = {"until_empty": until_empty, "on_complete": on_complete, "report_poll": report_poll}
        return recording.flow(publisher, real, flags)

    def _retries(self, *ports: Any, **named: Any) -> Retries:
        self.settling.append(SettlingRecording(self._limit))
        return self.settling[-1].retries(*ports, **named)

    def _settler(self, *ports: Any, **named: Any) -> Settler:
        return self.settling[-1].settler(*ports, **named)
