"""Who owns a shard, and how the number of shards changes."""
