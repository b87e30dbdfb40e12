"""PostgreSQL and the real Apache Kafka from wheels, for the demo, the tests and whoever wants to look first.

`stack` gives both for the length of a block; `postgres.running` and `kafka.running` give one each, with
settings and faults of one's own.
"""

from outbox_pipelines.local.client import Stack, stack

__all__ = ["Stack", "stack"]
