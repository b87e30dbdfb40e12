"""The databases of these tests."""

from tests.schema.servers import database, server, template

__all__ = ["database", "server", "template"]
