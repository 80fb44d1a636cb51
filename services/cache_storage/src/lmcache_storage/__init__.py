"""cache_storage: keeps KV chunks in memory and on disk, for everybody, over REST and lm://."""
