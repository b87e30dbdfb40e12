"""Switches there and back under writers, kills and restarts, judged by what was committed and what arrived.

As a program: ``python -m tests.existing.adopt.cycles [--seconds S] [--seed N] [--delivery …]``.

Invariants:
- Writers write into `outbox` by its name all the time, and know of nothing. Each locks its account first,
  so that the numbers of an account are its order.
- Relays are ended for a switch, as the command asks for, and started again right after it, before `drain`
  or the end of `back`: the database alone makes them wait.
- In exactly_once, only what publishes exactly once is killed: the relay of the append-only outbox. The
  relay of a marked table repeats what was in flight when it is killed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psycopg

from outbox_pipelines.local import Stack
from tests.conftest import command, fresh_database, topic_prefix
from tests.existing import textbook
from tests.history import business, reader
from tests.history.judge import Verdict, judge
from tests.history.processes import Process
from tests.history.record import Delivery, Fault, History
from tests.history.writers import APPLICATION, Writers

_MAPPING: Final = textbook.PUBLISHED_AT_MAPPING.replace("public.events", "public.outbox")
_TABLE: Final = textbook.PUBLISHED_AT.replace("events (", "outbox (").replace("ON events", "ON outbox")
_QUICK: Final = {"OUTBOX_LEASE_SECONDS": "2", "OUTBOX_RETRY_SECONDS": "0.2", "OUTBOX_SCHEMA": "box"}
_PATIENCE: Final = 300.0


class Cycles:
    """One table, its writers, both relays, and the commands."""

    def __init__(self, dsn: str, kafka: str, seed: int, directory: Path, delivery: Delivery) -> None:
        self.chance = random.Random(seed)
        self.delivery = delivery
        self.switches = self.kills = 0
        self._dsn, self._kafka = dsn, kafka
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        self._topics = {kind: topic.format(aggregate_type=kind) for kind in business.KINDS}
        reader.create(kafka, self._topics)
        with psycopg.connect(dsn, autocommit=True) as connection:
            business.prepare(connection)
            connection.execute(_TABLE.encode())
        ours = {"OUTBOX_DSN": dsn, "OUTBOX_KAFKA": kafka, "OUTBOX_TOPIC": topic, **_QUICK}
        self._environment = ours | {
            "OUTBOX_TABLE": json.dumps(tomllib.loads(_MAPPING)),
            "OUTBOX_DELIVERY": delivery,
        }
        of_table = self._environment | {"OUTBOX_DELIVERY": "at_least_once"}
        of_outbox = ours | {"OUTBOX_DELIVERY": delivery, "OUTBOX_TRANSACTION_SECONDS": "4"}
        self.of_table = Process("of the table", command("relay"), of_table, directory)
        self.of_outbox = Process("of the outbox", command("relay"), of_outbox, directory)
        self._directory = directory
        self._killable = [self.of_outbox]
        if delivery == "at_least_once":
            self._killable.append(self.of_table)
        self._running: list[Process] = []
        self._is_writing = True
        write = (sys.executable, "-m", "tests.history.writers", dsn, str(seed), "2")
        self._writer = Process("writer", write, {}, directory)
        self._writers = Writers(dsn, seed, 3)

    def prepare(self) -> None:
        self._writer.start()
        self._run("prepare")
        self._start(self.of_table)

    def cycle(self) -> None:
        """There and back, with what chance brings."""
        self._wait(self.chance.uniform(0.2, 2))
        self._end(self.of_table)
        self._run("switch")
        self._start(self.of_outbox)
        if self.chance.random() < 0.5:
            # It follows the table to its new name.
            self._start(self.of_table)
        self._wait(self.chance.uniform(0, 1))
        self._run("drain", is_killed=self.delivery == "at_least_once")
        self._wait(self.chance.uniform(0.2, 2))
        self._end(self.of_table)
        if self.chance.random() < 0.5:
            self._end(self.of_outbox)
        self._run("back", is_killed=True, then=self.of_table)
        self._end(self.of_outbox)
        self.switches += 1

    def finish(self) -> Verdict:
        """Everything is published; the verdict."""
        # What is written after the commits are read would count as a phantom.
        self._is_writing = False
        self._writer.kill()
        self._writers.stop()
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            self._until(lambda: not _one(connection, _WRITING), "the writers' last transactions")
            committed = business.committed(connection)
            pending = "SELECT count(*) FROM public.outbox WHERE published_at IS NULL"
            self._until(lambda: not _one(connection, pending), "everything published")
        for process in self._running:
            process.terminate()
        history = History("adopt", 0, self.delivery, committed=committed)
        if self.delivery == "at_least_once":
            history.faults.append(Fault("kills", 0, float("inf"), disturbs=True))
        history.messages, _ = reader.read(self._kafka, self._topics)
        return judge(history)

    def close(self) -> None:
        for process in (self._writer, self.of_table, self.of_outbox):
            process.kill()
        reader.remove(self._kafka, self._topics)

    def _start(self, process: Process) -> None:
        if process not in self._running:
            process.start()
            self._running.append(process)

    def _end(self, process: Process) -> None:
        if process not in self._running:
            return
        self._running.remove(process)
        if process in self._killable and self.chance.random() < 0.5:
            process.kill()
            self.kills += 1
        else:
            process.terminate()

    def _tend(self) -> None:
        """Kills by chance, and starts again what has ended."""
        for process in self._running:
            if process in self._killable and self.chance.random() < 0.02:
                process.kill()
                self.kills += 1
                process.start()
            elif process.exit_code is not None:
                process.start()
        if self._is_writing and self.chance.random() < 0.02:
            self._writer.kill()
            self._writer.start()

    def _is_returning(self) -> bool:
        with psycopg.connect(self._dsn) as connection:
            return _one(connection, _RETURNING) == 1

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            self._tend()

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        until = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < until, f"{what} within {_PATIENCE:.0f} s"
            self._wait(0.1)

    def _run(self, step: str, *, is_killed: bool = True, then: Process | None = None) -> None:
        """Runs a command until it succeeds; by chance, it is killed at first.

        Args:
            then: is started as soon as the table has its name again, before the command ends.
        """
        name = f"adopt {step}"
        until = time.monotonic() + _PATIENCE
        kills = is_killed and self.chance.random() < 0.6
        while True:
            process = Process(name, command("adopt", step), self._environment, self._directory)
            process.start()
            moment = time.monotonic() + self.chance.choice([0.3, 0.6, 0.8, 1.0, 1.5])
            while process.exit_code is None:
                if kills and time.monotonic() > moment:
                    process.kill()
                    self.kills += 1
                    break
                time.sleep(0.02)
                if then is not None and self._is_returning():
                    self._start(then)
                self._tend()
            if not kills and process.exit_code == 0:
                break
            kills = False
            assert time.monotonic() < until, process.last_words
            # A relay's session that was just killed.
            time.sleep(0.2)
        if then is not None:
            self._start(then)


_RETURNING: Final = "SELECT count(*) FROM box.outbox_adopted WHERE state = 'returning'"
_WRITING: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    f"AND application_name = '{APPLICATION}'"
)


def _one(connection: psycopg.Connection[tuple[object, ...]], query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]


@contextmanager
def cycles(stack: Stack, seed: int, directory: Path, delivery: Delivery) -> Iterator[Cycles]:
    with fresh_database(stack.dsn) as dsn:
        made = Cycles(dsn, stack.kafka, seed, directory, delivery)
        try:
            made.prepare()
            yield made
        finally:
            made.close()


def main() -> int:
    from outbox_pipelines.local import stack
    from outbox_pipelines.settings import load_settings

    parser = argparse.ArgumentParser(prog="python -m tests.existing.adopt.cycles")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--delivery", choices=["at_least_once", "exactly_once"], default="at_least_once")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    with stack(load_settings()) as running, tempfile.TemporaryDirectory() as directory:
        print("SEED", given.seed, given.delivery, flush=True)
        with cycles(running, given.seed, Path(directory), given.delivery) as run:
            while time.monotonic() < until:
                run.cycle()
            verdict = run.finish()
        print(f"{run.switches} cycles, {run.kills} kills: {verdict}", flush=True)
        if verdict.wrong:
            for log in Path(directory).glob("*.log"):
                print(log.name, log.read_text()[-3000:], sep="\n")
        return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
