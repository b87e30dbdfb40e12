"""Relays an existing textbook outbox table as it is: rows are claimed, published, and marked."""
