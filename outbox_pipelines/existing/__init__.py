"""Relays a marked table (an existing outbox table): rows are claimed, published, and marked."""
