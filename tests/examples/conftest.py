"""The servers and databases of these tests."""

from tests.schema.servers import database, empty, server

__all__ = ["database", "empty", "server"]
