"""The servers and databases of these tests."""

from tests.schema.servers import database, wheel_server

__all__ = ["database", "wheel_server"]
