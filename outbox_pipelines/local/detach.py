"""Start the supervisor so that it outlives the process that started it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from outbox_pipelines.local.state import Home


@dataclass(frozen=True)
class Plan:
    """The arguments of a supervisor; plain values, because they are passed on its command line."""

    directory: str
    jars: str
    postgres: str
    grace_seconds: float


def spawn(plan: Plan, lock: int) -> None:
    """Start a supervisor that inherits the supervisor's lock; the caller lets go of its own copy."""
    # -P: the caller's working directory is no place to import from.
    command = [sys.executable, "-P", "-m", "outbox_pipelines.local.supervisor", json.dumps(asdict(plan))]
    with Home(Path(plan.directory)).log.open("wb") as log:
        # It forks at once: what ends here is only the first half, so no zombie is left behind.
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
            check=False,
        )
