"""KV of the shape of Llama-3.1-8B's, made up: no such model is at hand, and speed and tables
need its size.
"""

from __future__ import annotations

import torch

from tests.bench.shape import CHUNK_SIZE, HIDDEN, NUM_LAYERS

SEED = 31
CORRELATION = 0.6
OUTLIER_SHARE, OUTLIER_FACTOR = 0.03, 8.0
SCALE_SPREAD = (0.5, 0.3)
OFFSET_SPREAD = (1.0, 0.1)
VALUE_SCALE = 0.3


def synthetic_kv(
    num_tokens: int = CHUNK_SIZE, num_layers: int = NUM_LAYERS, hidden: int = HIDDEN
) -> torch.Tensor:
    """A chunk, bf16 `[2, num_layers, num_tokens, hidden]`, the same every time.

    Each channel of each layer has a scale (log-normal, sigma 0.5 for keys and 0.3 for values) and
    an offset (normal, 1.0 and 0.1 of its scale); 3 % of the keys' channels have eight times the
    offset and scale. Along the tokens a channel is a Gaussian AR(1) of correlation 0.6. Values are
    0.3 of the keys' size.
    """
    random = torch.Generator().manual_seed(SEED)
    kv = torch.empty(2, num_layers, num_tokens, hidden, dtype=torch.bfloat16)
    for side in range(2):
        scales = torch.randn(num_layers, hidden, generator=random).mul(SCALE_SPREAD[side]).exp()
        offsets = torch.randn(num_layers, hidden, generator=random) * OFFSET_SPREAD[side] * scales
        if side == 0:
            factors = 1 + (OUTLIER_FACTOR - 1) * (
                torch.rand(num_layers, hidden, generator=random) < OUTLIER_SHARE
            )
            scales, offsets = scales * factors, offsets * factors
        else:
            scales, offsets = scales * VALUE_SCALE, offsets * VALUE_SCALE
        state = torch.randn(num_layers, hidden, generator=random)
        for token in range(num_tokens):
            kv[side, :, token] = offsets + scales * state
            state = CORRELATION * state + (1 - CORRELATION**2) ** 0.5 * torch.randn(
                num_layers, hidden, generator=random
            )
    return kv
