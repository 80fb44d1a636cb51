"""The reference of `cachegen_encode`, for tests: whole planes for the model, one symbol after the
other for the streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lmcache_kernels.codec_shape import (
    DELTA_FLAG,
    LANES,
    LOWEST_STATE,
    PRECISION_BITS,
    CodecShape,
    EncodedPlanes,
)
from lmcache_kernels.codec_tables import Alphabet

Integers = npt.NDArray[np.int64]


def cachegen_encode_reference(
    values: torch.Tensor,
    shape: CodecShape,
    levels: Sequence[int],
    alphabets: Mapping[int, Alphabet],
    wraps: bool,
) -> EncodedPlanes:
    """Compute `cachegen_encode` for tensors on the CPU, given the tables by their levels."""
    shifts = np.zeros((shape.planes, shape.groups), np.int16)
    shapes = np.zeros((shape.planes, shape.groups), np.uint8)
    streams: list[list[int]] = []
    for plane in range(shape.planes):
        top, alphabet = levels[plane], alphabets[levels[plane]]
        symbols = np.zeros(shape.sizes[1:], np.int64)
        for group in range(shape.groups):
            columns = slice(group * shape.group, (group + 1) * shape.group)
            found = _model(values[plane, :, columns].numpy().astype(np.int64), top, alphabet, wraps)
            shifts[plane, group], shapes[plane, group], symbols[:, columns] = found
        tables = np.repeat(shapes[plane] & (DELTA_FLAG - 1), shape.group)[: shape.channels]
        for first in range(0, shape.channels, shape.section):
            columns = slice(first, first + shape.section)
            streams.append(
                _stream(symbols[:, columns] + top, tables[columns], alphabet.frequencies)
            )
    lengths = torch.tensor([len(stream) for stream in streams], dtype=torch.int32)
    words = np.array([word for stream in streams for word in stream], np.uint16).view(np.int16)
    return EncodedPlanes(
        torch.from_numpy(shifts), torch.from_numpy(shapes), lengths, torch.from_numpy(words)
    )


def _model(
    values: Integers, levels: int, alphabet: Alphabet, wraps: bool
) -> tuple[int, int, Integers]:
    """Return shift and shape of a group's values, and the symbols relative to them."""
    count, size = values.size, 2 * levels + 1
    shift = (2 * int(values.sum()) + count) // (2 * count)
    if not wraps:
        shift = max(min(shift, int(values.min()) + levels), int(values.max()) - levels)
    centred = (values - shift + levels) % size - levels
    before = np.concatenate([np.zeros((1, values.shape[1]), np.int64), centred[:-1]])
    deltas = (centred - before + levels) % size - levels
    is_delta = int((deltas**2).sum()) * 16 < int((centred**2).sum()) * 15
    symbols = deltas if is_delta else centred
    bounds, reach = alphabet.choice
    variance = int((symbols**2).sum()) * 256 // count
    width = sum(variance > int(bound) for bound in bounds)
    is_wide = int(np.abs(symbols).max()) > int(reach[width])
    return shift, 2 * width + is_wide + DELTA_FLAG * is_delta, symbols


def _stream(symbols: Integers, tables: Integers, frequencies: Integers) -> list[int]:
    """Return the words of a section `[tokens, width]`; column `i` is coded with `tables[i]`."""
    starts = np.cumsum(frequencies, 1) - frequencies
    flat, of_symbol = symbols.ravel().tolist(), np.tile(tables, len(symbols)).tolist()
    states = [LOWEST_STATE] * LANES
    backwards = []
    for i in reversed(range(len(flat))):
        frequency, start = (
            int(frequencies[of_symbol[i], flat[i]]),
            int(starts[of_symbol[i], flat[i]]),
        )
        state = states[i % LANES]
        if state >= frequency << (31 - PRECISION_BITS):
            backwards.append(state & 0xFFFF)
            state >>= 16
        states[i % LANES] = (state // frequency << PRECISION_BITS) + start + state % frequency
    return [half for state in states for half in (state >> 16, state & 0xFFFF)] + backwards[::-1]
