"""The servers and databases of these tests."""

from tests.schema.servers import database, empty, server, template

__all__ = ["database", "empty", "server", "template"]
