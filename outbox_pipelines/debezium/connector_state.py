"""The state of the connector of an outbox: what is wrong with it, and what to do. Types only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from outbox_pipelines.core.text import size

_RUNNING: Final = "RUNNING"
_GUIDE: Final = "`outbox debezium config` and docs/debezium-on-connect.md"
_LET_KAFKA_TAKE_IT: Final = (
    "All events wait behind it. Let Kafka take it (max.message.bytes, the topic), then restart the "
    "connector: {}. If Kafka cannot take it, see docs/debezium-on-connect.md"
)
_LOST: Final = (
    "remove the connector with its offsets, publish what was not sent with the relay, and register it again: "
    "see docs/debezium-on-connect.md"
)
# What a trace says about the event that ended the task.
_ROWS: Final = (
    (re.compile(r"Invalid topics?: \[?([^\],\s]+)"), "an event for the topic {}, which is no valid name"),
    (re.compile(r"message is (\d+) bytes when serialized"), "an event of {} bytes, which is too large"),
    (re.compile(r"org\.apache\.kafka\.common\.errors\.RecordTooLargeException"), "an event is too large"),
    (re.compile(r"Not authorized to access topics: \[([^\]]+)\]"), "an event for {}, which is not allowed"),
)
_CAUSE: Final = re.compile(r"^Caused by: (.*)$", re.MULTILINE)
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the connector; Debezium has one."""

    id: int
    state: str
    worker: str
    trace: str | None

    @property
    def reason(self) -> str:
        """Why it failed: the first line of the trace's innermost cause, and the event if it says which."""
        if not self.trace:
            return "Kafka Connect gives no reason"
        lines = [*self.trace.splitlines()[:1], *_CAUSE.findall(self.trace)[-1:]]
        found = "; caused by ".join(dict.fromkeys(line.strip()[:_LONGEST] for line in lines))
        for pattern, event in _ROWS:
            if match := pattern.search(self.trace):
                return f"{event.format(*match.groups())} ({found})"
        return found

    @property
    def has_poison(self) -> bool:
        """Whether an event ended it, so that it ends again at each restart."""
        return any(pattern.search(self.trace or "") for pattern, _ in _ROWS)


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector as Kafka Connect has it, and its slot as PostgreSQL has it."""

    name: str
    error: str | None
    """Why Kafka Connect could not be asked."""
    state: str | None
    """RUNNING, PAUSED, STOPPED, FAILED, UNASSIGNED, RESTARTING; None if there is no connector."""
    worker: str | None
    trace: str | None
    """Of the connector itself."""
    tasks: list[Task]
    slot: str
    slot_exists: bool
    slot_lost: bool
    slot_active: bool
    unconfirmed_bytes: int | None
    """From the position that the connector has confirmed to the end of the log."""
    retained_bytes: int | None
    """What the server keeps for it."""
    waiting_seconds: float
    """Age of the oldest committed event that the connector has not confirmed; 0 without one."""

    @property
    def problems(self) -> list[str]:
        """What a person must act on, each with the remedy."""
        if self.error is not None:
            return [self.error]
        if self.state is None:
            missing = f"there is no connector {self.name}"
            if self.slot_exists:
                return [
                    f"{missing}, and the server keeps its log for the slot {self.slot}: register the "
                    f"connector ({_GUIDE}), or drop the slot: SELECT pg_drop_replication_slot('{self.slot}')"
                ]
            return [f"{missing}: register it ({_GUIDE})"]
        found = []
        if self.state == "FAILED":
            reason = Task(0, "FAILED", self.worker or "", self.trace).reason
            found.append(f"the connector {self.name} has failed: {reason}. Restart it: {self._restart}")
        elif self.state in ("PAUSED", "STOPPED"):
            found.append(
                f"the connector {self.name} is {self.state.lower()}, and events wait: resume it with PUT "
                f"/connectors/{self.name}/resume"
            )
        elif self.state == _RUNNING and not self.tasks:
            found.append(f"the connector {self.name} has no task: restart it with {self._restart}")
        found += [self._of_task(task) for task in self.tasks if task.state in ("FAILED", "UNASSIGNED")]
        if not self.slot_exists:
            found.append(f"the slot {self.slot} is missing: {_LOST}")
        elif self.slot_lost:
            found.append(f"the slot {self.slot} is lost, since the server has removed its log: {_LOST}")
        return found

    @property
    def _restart(self) -> str:
        return f"POST /connectors/{self.name}/restart?includeTasks=true"

    def _of_task(self, task: Task) -> str:
        if task.state == "UNASSIGNED":
            return f"task {task.id} has no worker: start a worker, or wait until the others have taken it"
        remedy = _LET_KAFKA_TAKE_IT if task.has_poison else "Restart the connector: {}"
        return f"task {task.id} has failed on {task.worker}: {task.reason}. {remedy.format(self._restart)}"

    def lines(self) -> list[str]:
        """Return it for people."""
        if self.state is None:
            return [f"connector: {self.name} ({'none' if self.error is None else 'unknown'})"]
        return [
            f"connector: {self.name}",
            f"state: {self.state} on {self.worker}",
            *(f"task {task.id}: {task.state} on {task.worker}" for task in self.tasks),
            f"slot: {self.slot}" + ("" if self.slot_active else " (no session reads it)"),
            f"log that is not confirmed: {size(self.unconfirmed_bytes)}",
            f"log kept for it: {size(self.retained_bytes)}",
            f"oldest event that is not confirmed: {self.waiting_seconds:,.0f} s",
        ]
