"""Partitions of an existing table, by months, made before their first row."""
