"""Change data capture: the outbox read from PostgreSQL's log, by a logical replication slot of its own."""
