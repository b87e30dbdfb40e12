"""What the supervisor and its clients tell each other, as files in the stack's directory.

Invariants:
- `state.json` is written by the supervisor alone, under another name and then renamed: readers see all or
  nothing. It counts only while the supervisor's lock is held; no pid is ever trusted.
- Clients talk back with empty files in `control/`: the names of the servers they want, `keep`, `stop`. A new
  supervisor starts with an empty `control/`; who waits for it sets its wishes again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from outbox_pipelines.errors import SetupError

POSTGRES = "postgres"
KAFKA = "kafka"
KEEP = "keep"
STOP = "stop"


@dataclass(frozen=True)
class State:
    """What runs: connection strings, empty for a server that is not (yet) ready; and why it failed."""

    dsn: str = ""
    kafka: str = ""
    error: str = ""


@dataclass(frozen=True)
class Home:
    """The directory of one local stack."""

    path: Path

    @property
    def lease(self) -> Path:
        """Held, shared, by everyone who uses the stack."""
        return self.path / "lease"

    @property
    def lock(self) -> Path:
        """Held by the supervisor for as long as it lives."""
        return self.path / "supervisor.lock"

    @property
    def start_lock(self) -> Path:
        """Held while a supervisor is being started."""
        return self.path / "start.lock"

    @property
    def log(self) -> Path:
        """What the supervisor printed."""
        return self.path / "supervisor.log"

    def make(self) -> None:
        """Create the directory."""
        # Access to the servers' files is access to the data: no other user may enter.
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.path / "control").mkdir(exist_ok=True)
            os.close(os.open(self.lease, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise SetupError(
                f"cannot write to {self.path} ({error.strerror}): set OUTBOX_LOCAL_DIR to one of yours"
            ) from None

    def clear(self) -> None:
        """Forget what an earlier supervisor left behind; only while none lives and none is started."""
        (self.path / "state.json").unlink(missing_ok=True)
        # The files alone: others may be adding to the directory.
        for wish in (self.path / "control").iterdir():
            wish.unlink(missing_ok=True)

    def ask(self, name: str) -> None:
        """Leave a wish for the supervisor."""
        (self.path / "control" / name).touch()

    def asked(self, name: str) -> bool:
        """Return whether that wish was left."""
        return (self.path / "control" / name).exists()

    def read(self) -> State:
        """The supervisor's last word; an empty state where it has said nothing."""
        try:
            return State(**json.loads((self.path / "state.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return State()

    def write(self, state: State) -> None:
        """Publish a state; the supervisor alone does."""
        new = self.path / "state.json.new"
        new.write_text(json.dumps(asdict(state)))
        new.replace(self.path / "state.json")


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
