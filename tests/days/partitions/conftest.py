"""The servers and databases of these tests."""

from tests.schema.servers import both_servers, database, template

__all__ = ["both_servers", "database", "template"]
