"""What a run writes down when nothing moves: sessions and locks, the consumers' group, stacks of threads.

Invariants:
- It only looks, from outside; an error of one look is written down and spoils no other.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import psycopg

from tests.kafka_clients import AdminClient, committed

SIGNAL = signal.SIGUSR1
_SESSIONS = """
SELECT pid, application_name, client_port, state, wait_event_type, wait_event, pg_blocking_pids(pid),
       clock_timestamp() - xact_start, clock_timestamp() - state_change, left(query, 300)
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY xact_start"""
_INBOX = """
SELECT state, count(*), min(next_attempt_at), max(attempts), max(last_error) FROM inbox GROUP BY state"""
_SECONDS = 10


def listen() -> None:
    """From now on, this program prints the stacks of its threads when it gets the signal."""
    faulthandler.register(SIGNAL)


def describe(dsn: str, kafka: str, groups_with: str, log: Path) -> None:
    """Append what database and broker say to the log.

    Args:
        groups_with: of consumers' groups, those whose names contain it.
    """
    with log.open("a") as file:
        for line in (*_rows(dsn, _SESSIONS), *_rows(dsn, _INBOX), *_groups(kafka, groups_with)):
            file.write(f"{line}\n")


def _rows(dsn: str, query: str) -> Iterator[str]:
    try:
        with psycopg.connect(dsn, connect_timeout=_SECONDS) as connection:
            yield from map(repr, connection.execute(query.encode()))
    except psycopg.Error as error:
        yield repr(error)


def _groups(kafka: str, groups_with: str) -> Iterator[str]:
    admin = AdminClient({"bootstrap.servers": kafka})
    try:
        listed = admin.list_consumer_groups(request_timeout=_SECONDS).result()
        names = [group.group_id for group in listed.valid if groups_with in group.group_id]
        for name in names:
            future = admin.describe_consumer_groups([name], request_timeout=_SECONDS)[name]
            group = future.result()
            yield f"{name}: {group.state}"
            yield from (
                f"  {member.client_id}: {member.assignment.topic_partitions}" for member in group.members
            )
            places = [at for member in group.members for at in member.assignment.topic_partitions]
            yield f"  {committed(kafka, name, places, _SECONDS) if places else 'no partitions'}"
    except confluent_kafka.KafkaException as error:
        yield repr(error)
