"""Relays of many outboxes in one process; several such processes divide the outboxes among themselves."""
