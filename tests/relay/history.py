"""A history checker: writers that lock their aggregate, and what a consumer must then have seen.

Invariants:
- The truth is the business table: `account.n` counts an account's committed events, and event n of an
  account carries n. So nothing about the outbox or the relay is believed.
- Writers roll back, hold transactions open, use savepoints; their choices follow the seed.

As a program: ``python -m tests.relay.history DSN SEED WRITERS`` writes until it is killed.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psycopg

from outbox_pipelines.writer import emit
from tests.conftest import Message

ACCOUNTS = 50


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Makes the business table."""
    connection.execute("CREATE TABLE account (id int PRIMARY KEY, n int NOT NULL DEFAULT 0)")
    connection.execute("INSERT INTO account (id) SELECT generate_series(0, %s)", [ACCOUNTS - 1])


class Writers:
    """Threads that write until they are stopped."""

    def __init__(self, dsn: str, seed: int, count: int) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(dsn, random.Random(seed * 1000 + n)), daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them, each after its transaction; raises what went wrong in one of them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failures:
            raise self._failures[0]

    def _run(self, dsn: str, chance: random.Random) -> None:
        try:
            with psycopg.connect(dsn, application_name="history") as connection:
                while not self._stop.is_set():
                    transaction(connection, chance)
        except psycopg.Error as error:
            self._failures.append(error)


def transaction(connection: psycopg.Connection[Any], chance: random.Random) -> None:
    """One business transaction: accounts in order of their ids, each locked before its event is written."""
    for account in sorted(chance.sample(range(ACCOUNTS), chance.choice([1, 1, 1, 3]))):
        if chance.random() < 0.1:
            with connection.transaction(force_rollback=True):
                _write(connection, account)
        _write(connection, account)
        if chance.random() < 0.05:
            time.sleep(chance.random() * 0.05)
    if chance.random() < 0.1:
        connection.rollback()
    else:
        connection.commit()


def _write(connection: psycopg.Connection[Any], account: int) -> None:
    row = connection.execute("UPDATE account SET n = n + 1 WHERE id = %s RETURNING n", [account]).fetchone()
    assert row is not None
    emit(connection, "order", account, "account.counted", {"n": row[0]})


@dataclass
class Findings:
    """What is wrong between the business table and the topic; empty when all guarantees held."""

    lost: list[str] = field(default_factory=list)
    phantoms: list[str] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    committed: int = 0
    duplicates: int = 0

    @property
    def wrong(self) -> list[str]:
        return [
            f"{kind} {events[:5]}"
            for kind, events in (
                ("lost", self.lost),
                ("phantom", self.phantoms),
                ("reordered", self.reordered),
            )
            if events
        ]


def check(connection: psycopg.Connection[Any], messages: list[Message]) -> Findings:
    """Compares; first deliveries count for the order, later ones are duplicates (G1, G2, G5)."""
    committed: dict[str, int] = {
        str(account): n for account, n in connection.execute("SELECT id, n FROM account")
    }
    findings = Findings(committed=sum(committed.values()))
    ids: dict[str, dict[int, str]] = {account: {} for account in committed}
    last = dict.fromkeys(committed, 0)
    for message in messages:
        n, account = json.loads(message.value)["n"], message.key
        first_id = ids[account].setdefault(n, message.headers["id"])
        if n > committed[account] or first_id != message.headers["id"]:
            findings.phantoms.append(f"{account}/{n}")
        elif len(ids[account]) == last[account]:
            findings.duplicates += 1
        else:
            last[account] += 1
            if n != last[account]:
                findings.reordered.append(f"{account}/{n}")
    for account, count in committed.items():
        findings.lost += [f"{account}/{n}" for n in range(1, count + 1) if n not in ids[account]]
    return findings


if __name__ == "__main__":
    writers = Writers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("writing", flush=True)
    threading.Event().wait()
