"""KV as small whole numbers: the quantisers, the model of their symbols, and the blob that holds
a quantised tensor (docs/codec.md).
"""
