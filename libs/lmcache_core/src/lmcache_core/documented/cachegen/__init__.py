"""CacheGen as documented: one tensor as bytes and back, and each step of it.

`serializer` uses the codec of the live path. `quantization`, `streams` and `outputs` are the
documented single steps: they code one stream for each layer and channel.
"""
