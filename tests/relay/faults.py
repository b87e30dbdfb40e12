"""What the fault tests share: relays that are killed, and the verdict of the history."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import Outbox, clean_environment, command, wait_until
from tests.history.judge import Verdict, judge
from tests.history.verify import history
from tests.history.verify import seed as seed

_ROW: Final = "SELECT seq, tx, xmin, created_at, id FROM outbox WHERE payload ->> 'token' = %s"


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
        process.kill()
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


def drain(outbox: Outbox, settings: Settings) -> None:
    """Publishes what is left, without the pauses after crashes or refusals."""

    def is_done() -> bool:
        with outbox.connect() as connection:
            connection.execute("UPDATE outbox_parked SET next_attempt_at = NULL WHERE state = 'retrying'")
            waiting = service.relay(settings, until_empty=True).unpublished
            if waiting:
                print("parked:", connection.execute("SELECT * FROM outbox_parked LIMIT 3").fetchall())
        return not waiting

    wait_until(is_done, seconds=120, what="nothing parked")


def verify(outbox: Outbox) -> Verdict:
    """Publishes what is left, and judges."""
    drain(outbox, outbox.settings)
    judged = history(outbox)
    found = judge(judged)
    print(found)
    if found.lost_write:
        # What tells an event that was passed over from one that committed later, or was published elsewhere.
        with outbox.connect() as connection:
            print("position:", connection.execute("SELECT * FROM outbox_shards").fetchall())
            print("settled:", connection.execute("SELECT * FROM outbox_progress ORDER BY 1").fetchall())
        tokens = {message.token for message in judged.messages}
        for lost in (event for event in judged.committed if event.token not in tokens):
            with outbox.connect() as connection:
                print(connection.execute(_ROW, [lost.token]).fetchone())
            same = [m for m in judged.messages if (m.kind, m.key) == (lost.kind, lost.account)]
            print(lost, *[(m.partition, m.offset, m.n, m.at) for m in same])
    assert found.wrong == []
    assert found.committed > 0
    return found
