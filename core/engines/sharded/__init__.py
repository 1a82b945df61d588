"""The engine that shards the weights."""
