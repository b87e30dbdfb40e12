"""The relay's core in a small world: PostgreSQL, Kafka, writers, operators, time, and a fault at any call."""
