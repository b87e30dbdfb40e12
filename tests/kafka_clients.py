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


def _close(client: confluent_kafka.Consumer | admin.AdminClient) -> None:
    if isinstance(client, confluent_kafka.Consumer):
        client.close()


def administrator(kafka: str) -> AdminClient:
    """A client that creates, changes and deletes."""
    return AdminClient({"bootstrap.servers": kafka})
