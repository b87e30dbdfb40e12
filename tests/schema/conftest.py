"""The servers and databases of these tests."""

from tests.schema.servers import connection, database, empty, kept, server, shared, template

__all__ = ["connection", "database", "empty", "kept", "server", "shared", "template"]
