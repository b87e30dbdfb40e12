"""What the fault tests share: relays that are killed, and the verdict of the history."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from outbox_pipelines.quality import measurements
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import Outbox, clean_environment, command, wait_until
from tests.history.judge import Verdict
from tests.history.verify import seed as seed
from tests.history.verify import verdict


@contextmanager
def process(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process: forks.Popen[str] = forks.Popen(
        arguments,
        env=clean_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    failed = True
    try:
        yield process
        failed = False
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if failed and process.stderr is not None and not process.stderr.closed:
            print(process.stderr.read())
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def relay(outbox: Outbox, **environment: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return process(command("relay"), outbox.environment | environment)


def published(outbox: Outbox) -> Callable[[], int]:
    """Reads where the relay is: changes with every settle of events."""
    connection = outbox.connect()

    def read() -> int:
        row = connection.execute("SELECT coalesce(sum(events), 0)::bigint FROM outbox_progress").fetchone()
        assert row is not None
        return int(row[0])

    return read


def wait_for_more(published: Callable[[], int], more: int = 1, seconds: float = 20.0) -> None:
    goal = published() + more
    wait_until(lambda: published() >= goal, seconds=seconds, what=f"the relay to publish {more} more")


def owner(outbox: Outbox) -> str | None:
    return measurements.read(outbox.settings).shards[0].owner


def drain(outbox: Outbox, settings: Settings) -> None:
    """Publishes what is left, without the pauses after crashes."""

    def is_done() -> bool:
        with outbox.connect() as connection:
            connection.execute(
                "UPDATE outbox_parked SET next_attempt_at = clock_timestamp() WHERE crashes > 0"
            )
        return not service.relay(settings, until_empty=True).paused

    wait_until(is_done, seconds=120, what="no event to wait after a death")


def verify(outbox: Outbox) -> Verdict:
    """Publishes what is left, and judges."""
    drain(outbox, outbox.settings)
    found = verdict(outbox)
    print(found)
    assert found.wrong == []
    assert found.committed > 0
    return found
