"""CacheGen as the documentation has it: one tensor as bytes and back, and each step of it.

`serializer` runs on the codec of the live path, or by kernels for a tensor on a GPU (`device`).
`quantization`, `streams` and `outputs` are the documented single steps: they code one stream for
each layer and channel, in a format of their own.
"""
