"""Reads the events of a shard: between snapshots, or from a replication slot."""
