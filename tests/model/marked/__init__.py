"""The relay of a marked table in a small world: rows, Kafka, writers, operators, time, any fault."""
