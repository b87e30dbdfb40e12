"""Judges relays by histories: what was committed under faults, beside what the topics hold afterwards."""
