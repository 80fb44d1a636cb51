"""Any tensor, smaller, bit for bit: what varies little in its elements (the exponent) is
entropy-coded, the rest stays (docs/codec.md).
"""
