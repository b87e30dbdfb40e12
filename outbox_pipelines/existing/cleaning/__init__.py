"""Removes published rows from an outbox table that exists already: row by row, and whole months."""
