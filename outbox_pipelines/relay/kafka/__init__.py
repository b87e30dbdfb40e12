"""What the relay does with Kafka: the client, topics, messages, producers."""
