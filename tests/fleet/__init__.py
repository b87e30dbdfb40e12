"""Many outboxes in one process."""
