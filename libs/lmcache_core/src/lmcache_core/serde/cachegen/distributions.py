"""How often each value of a channel occurs, as the 16-bit table that its stream is coded with.
Needs torch.
"""

from __future__ import annotations

import torch

HEADROOM = 32
"""So much of the 16 bits is kept for values that do not occur. More bins than this keep one for
each.
"""


def channel_distributions(symbols: torch.Tensor, num_bins: int) -> torch.Tensor:
    """The cumulative distribution of each channel of each layer: `cdf[i] = (0xFFFF - 32) * count /
    total + i`, rounded down.

    `count` is how many of the `total` tokens have a value below `i`. So every value has a
    probability, also one that does not occur.

    Args:
        symbols: uint8 or int8, `[nlayers, ntokens, nchannels]`, values 0 to `num_bins - 1`, any
            device.
        num_bins: The largest number of bins of a layer, at most 256.

    Returns:
        int16 with the bits of uint16, `[nlayers, nchannels, num_bins + 1]`, rising, 0 at first; on
        the device of `symbols`. New.
    """
    num_layers, num_tokens, num_channels = symbols.shape
    values = symbols.view(torch.uint8)
    table = torch.zeros(
        num_layers, num_channels, num_bins + 1, dtype=torch.int64, device=symbols.device
    )
    rows = torch.arange(num_channels, device=symbols.device) * num_bins
    for layer in range(num_layers):
        occurrences = torch.bincount(
            (values[layer] + rows).flatten(), minlength=num_channels * num_bins
        )
        table[layer, :, 1:] = occurrences.view(num_channels, num_bins).cumsum(dim=1)
    scaled = table * (0xFFFF - max(HEADROOM, num_bins)) // max(num_tokens, 1)
    scaled += torch.arange(num_bins + 1, device=symbols.device)
    return ((scaled ^ 0x8000) - 0x8000).to(torch.int16)
