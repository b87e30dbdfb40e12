"""Transactional outbox on PostgreSQL and Kafka: write events with your rows, relay them in order."""

__version__ = "0.1.0"


class Error(Exception):
    """The base of all errors that this package raises for its users; the message says what to do."""
