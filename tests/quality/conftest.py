"""The servers and databases of these tests."""

from tests.schema.servers import database, server

__all__ = ["database", "server"]
