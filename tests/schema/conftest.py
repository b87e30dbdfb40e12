"""The servers and databases of these tests."""

from tests.schema.servers import both_servers, connection, database, empty, kept, shared, template

__all__ = ["both_servers", "connection", "database", "empty", "kept", "shared", "template"]
