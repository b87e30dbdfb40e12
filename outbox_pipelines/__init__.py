"""Transactional outbox on PostgreSQL and Kafka: write events with your rows, relay them in order."""

__version__ = "0.1.0"
