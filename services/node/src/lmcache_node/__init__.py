"""The common part of the sidecar and the cache storage: a node stores chunks, serves them over
lm://, reports to lookup and broker, and hands over its chunks when it shuts down.

`node` opens and closes the shared parts in order. The services add what only they have.
"""
