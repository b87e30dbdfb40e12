"""The relay's access to Kafka: the client, topics, messages, producers."""
