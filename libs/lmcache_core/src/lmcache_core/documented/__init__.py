"""The parts that exist only because the documentation names them; this system does not run them.

Nothing else imports this package, except lazy re-exports under the documented names (checked by
`make contracts`), so a reader of the live path may skip it.

| module | documented as | what it is |
|---|---|---|
| `pools` | `lmcache_core.memory` | pools of equal slots |
| `mixed_allocator` | `lmcache_core.memory` | a pinned arena and byte buffers in one allocator |
| `radix` | `lmcache_core.token_database` | a token database that remembers prefixes |
| `tensor_backend` | `lmcache_core.storage` | the interface of a backend of tensors |
| `disk` | `lmcache_core.storage` | the disk tier with methods for one chunk at a time |
| `serdes` | `lmcache_core.serde` | Torch, Safe, Fast, those that log, and a codec over them |
| `cachegen` | `lmcache_core.serde`, `.serde.cachegen` | CacheGen of one tensor, step by step |
"""
