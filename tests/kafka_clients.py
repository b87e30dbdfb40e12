"""Kafka's clients of the tests: they log, where the library's own would print to stderr.

Invariants:
- A broker that a test stops is a warning in the captured log of the test that waits for it, and no line on
  the screen of another one.
- The package's clients are its own: what one of them prints is a fault.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import confluent_kafka
from confluent_kafka import admin

_LOG: Final = logging.getLogger("tests.kafka_clients")
# A program of a test has no other handler, and Python would print warnings then.
_LOG.addHandler(logging.NullHandler())


class Producer(confluent_kafka.Producer):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config), logger=_LOG)


class Consumer(confluent_kafka.Consumer):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config), logger=_LOG)


class AdminClient(admin.AdminClient):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config), logger=_LOG)
