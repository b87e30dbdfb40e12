"""What relays and consumers of a run ask and are answered, in part, played to their code again when they end.

Invariants:
- Of a process that is killed nothing is played.
- The file beside that of a process's steps has a line for each relay or consumer that ended: the number of
  entries that its code has repeated, or how it differs.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.history.processes import Process
from tests.history.record import History
from tests.model.consumer.tape import ConsumerRecording
from tests.model.relay.recorder import Recorder

SAMPLE = 1_000
"""How many entries of each tape are recorded, about."""
PLAYED = "calls and answers that were repeated"
_DIFFERS = "! "


@contextmanager
def sampled(recorder: Recorder | ConsumerRecording, steps: Path) -> Iterator[None]:
    """Play what is recorded of what ends with the block; write what comes of it."""
    try:
        yield
    finally:
        try:
            line = str(recorder.play())
        except AssertionError as error:
            traceback.print_exc()
            line = f"{_DIFFERS}{error}"
        with _of(steps).open("a") as file:
            print(line, file=file)


def collect(history: History, processes: Iterable[Process]) -> None:
    """Add to a history how much these processes have repeated, and how they differed."""
    history.figures[PLAYED] = 0
    for process in processes:
        path = _of(process.log.with_suffix(".steps"))
        for line in path.read_text().splitlines() if path.exists() else []:
            if line.startswith(_DIFFERS):
                history.different.append(f"{process.name}: {line.removeprefix(_DIFFERS)}")
            else:
                history.figures[PLAYED] += int(line)


def _of(steps: Path) -> Path:
    return steps.with_suffix(".tape")
