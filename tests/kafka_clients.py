"""Kafka's clients of the tests: they log, where the library's own would print to stderr.

Invariants:
- A broker that a test stops is a warning in the captured log of the test that waits for it, and no line on
  the screen of another one.
- The package's clients are its own: what one of them prints is a fault.
- A client is used again only for a broker that lasts as long as the run, and only if its last use succeeded;
  and only by the process that made it: a child has none of its threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import confluent_kafka
from confluent_kafka import admin

_LOG: Final = logging.getLogger("tests.kafka_clients")
# A program of a test has no other handler, and Python would print warnings then.
_LOG.addHandler(logging.NullHandler())

_Client = TypeVar("_Client", bound=confluent_kafka.Consumer | admin.AdminClient)
_LASTING: Final[set[str]] = set()
_IDLE: Final[dict[tuple[object, str, int], list[Any]]] = {}
# Of the groups that were asked about last.
_OBSERVERS: Final[dict[tuple[str, str, int], Any]] = {}


class Producer(confluent_kafka.Producer):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config), logger=_LOG)


class Consumer(confluent_kafka.Consumer):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config), logger=_LOG)


class AdminClient(admin.AdminClient):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config), logger=_LOG)


@contextmanager
def lent(make: Callable[[str], _Client], kafka: str) -> Iterator[_Client]:
    """A client for one question: that costs less than the client.

    Args:
        make: makes one for these bootstrap servers; the same function for each question that may share them.
    """
    idle = _IDLE.setdefault((make, kafka, os.getpid()), [])
    client = idle.pop() if idle else make(kafka)
    is_kept = False
    try:
        yield client
        is_kept = kafka in _LASTING
    finally:
        if is_kept:
            idle.append(client)
        else:
            _close(client)


@contextmanager
def lasting(kafka: str) -> Iterator[None]:
    """Use clients of this broker again for the length of the block."""
    _LASTING.add(kafka)
    try:
        yield
    finally:
        _LASTING.discard(kafka)
        for (_, *owner), idle in _IDLE.items():
            while owner == [kafka, os.getpid()] and idle:
                _close(idle.pop())
        _close_observers(0)


def _close(client: confluent_kafka.Consumer | admin.AdminClient) -> None:
    if isinstance(client, confluent_kafka.Consumer):
        client.close()


def committed(
    kafka: str, group: str, asked: list[confluent_kafka.TopicPartition], seconds: float = 60.0
) -> list[confluent_kafka.TopicPartition]:
    """A group's offsets; negative where it has none.

    A consumer asks, which joins no group: AdminClient.list_consumer_group_offsets ends the process if the
    broker is not, or not yet, the group's coordinator (confluentinc/librdkafka#5040).
    """
    key = (kafka, group, os.getpid())
    if key not in _OBSERVERS:
        _close_observers(1)
        own = {"bootstrap.servers": kafka, "group.id": group, "enable.auto.commit": False}
        _OBSERVERS[key] = Consumer(own)
    try:
        return _OBSERVERS[key].committed(asked, timeout=seconds)  # type: ignore[no-any-return]
    except confluent_kafka.KafkaException:
        _OBSERVERS.pop(key).close()
        raise


def _close_observers(but: int) -> None:
    ours = [each for each in _OBSERVERS if each[2] == os.getpid()]
    for each in ours[: len(ours) - but]:
        _OBSERVERS.pop(each).close()


def administrator(kafka: str) -> AdminClient:
    """A client that creates, changes and deletes."""
    return AdminClient({"bootstrap.servers": kafka})
