"""Debezium in a Kafka Connect cluster, as the engine that publishes an outbox."""
