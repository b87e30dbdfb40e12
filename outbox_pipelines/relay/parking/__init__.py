"""Parked events: their table, the prober, dead letters."""
