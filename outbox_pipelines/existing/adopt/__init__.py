"""Moves a marked table to the append-only outbox while writers write: `outbox adopt`."""
