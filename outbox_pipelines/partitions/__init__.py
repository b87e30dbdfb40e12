"""The days of the outbox: a partition each, made ahead."""
