"""The types of observers of published events.

Invariants:
- An observer sees an event when it is passed to Kafka's client, and Kafka's answer; of the message it may
  change only the headers.
"""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import KafkaError, Message

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.kafka.encoding import Headers

Report = Callable[[KafkaError | None, Message], None]
# An event, its topic, its headers, and who wants to know what becomes of it: the last two, as they are to be.
Observe = Callable[[Event, str, Headers, Report], tuple[Report, Headers]]
