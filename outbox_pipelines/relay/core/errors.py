"""The error that ends the relay of a shard."""


class ShardLostError(Exception):
    """Another relay owns the shard, or the result of publishing is unknown: stop, and start over."""
