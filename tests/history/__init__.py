"""Judges relays by histories: compares what was committed under faults with what the topics contain."""
