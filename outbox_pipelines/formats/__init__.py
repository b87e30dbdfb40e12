"""Payloads in a format other than JSON, by a schema alone: no registry, no catalog, no network."""
