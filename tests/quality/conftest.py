from tests.schema.servers import database, template, wheel_server

__all__ = ["database", "template", "wheel_server"]
