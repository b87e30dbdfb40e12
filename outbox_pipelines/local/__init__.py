"""PostgreSQL and the real Apache Kafka from wheels, for the demo, the tests and a first evaluation.

`stack` provides both for the length of a block; `postgres.running` and `kafka.running` provide one each, with
custom settings and faults.
"""

from outbox_pipelines.local.stack_client import Stack, stack

__all__ = ["Stack", "stack"]
