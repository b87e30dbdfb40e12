"""The servers and databases of these tests."""

from tests.schema.servers import connection, database, empty, server, shared, template

__all__ = ["connection", "database", "empty", "server", "shared", "template"]
