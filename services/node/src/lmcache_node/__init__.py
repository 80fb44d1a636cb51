"""What the sidecar and the cache storage share: each is a node that keeps chunks, serves them over
lm://, tells lookup and broker about itself, and hands over what it holds when it ends.

`node` opens and closes the shared parts in order. The services add what only they have.
"""
