"""The databases of these tests."""

# Five seconds of a processor: a run's processes are forked from one that has imported it.
import great_expectations as great_expectations

from tests.schema.servers import database, server, template

__all__ = ["database", "server", "template"]
