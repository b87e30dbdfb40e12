"""Several outboxes: the file, and the commands that choose from it."""
