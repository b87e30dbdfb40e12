"""What ends the relay of a shard."""


class ShardLostError(Exception):
    """Another relay has the shard, or what became of its events cannot be known: stop, and start over."""
