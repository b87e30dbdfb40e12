"""The right to relay a shard, and the position that its owner moves."""
