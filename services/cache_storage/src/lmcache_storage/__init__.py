"""cache_storage: stores KV chunks in memory and on disk for all clients, over REST and lm://."""
