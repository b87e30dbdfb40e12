"""The idempotent consumer, explored: its own code, between a model of PostgreSQL and one of Kafka's group."""
