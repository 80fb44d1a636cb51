"""The reference of `cachegen_decode`, for tests: decodes one symbol after the other, then restores
whole planes.
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


def cachegen_decode_reference(
    encoded: EncodedPlanes,
    scales: torch.Tensor,
    levels: Sequence[int],
    shape: CodecShape,
    alphabets: Mapping[int, Alphabet],
    out: torch.Tensor,
    by_token: bool,
) -> torch.Tensor:
    """Compute `cachegen_decode` on the CPU, given the tables by their levels; no stream may be
    shorter than its states.
    """
    words = encoded.words.numpy().view(np.uint16).tolist()
    ends = encoded.lengths.cumsum(0).tolist()
    status = []
    for plane in range(shape.planes):
        alphabet = alphabets[levels[plane]]
        of_channel = np.repeat(encoded.shapes[plane].numpy(), shape.group)[: shape.channels]
        tables = of_channel & (DELTA_FLAG - 1)
        symbols = np.zeros((shape.tokens, shape.channels), np.int64)
        for section, first in enumerate(range(0, shape.channels, shape.section)):
            columns = slice(first, min(first + shape.section, shape.channels))
            end = ends[plane * shape.sections + section]
            stream = words[end - int(encoded.lengths[plane * shape.sections + section]) : end]
            is_right, symbols[:, columns] = _symbols(
                stream, shape.tokens, tables[columns], alphabet.frequencies
            )
            status.append(0 if is_right else 1)
        shifts = np.repeat(encoded.shifts[plane].numpy(), shape.group)[: shape.channels].astype(
            np.int64
        )
        whole = _whole(symbols - levels[plane], levels[plane], of_channel >= DELTA_FLAG)
        out[plane] = _restored(
            whole + shifts, levels[plane], scales[plane].view(torch.float32), by_token
        ).to(out.dtype)
    return torch.tensor(status, dtype=torch.uint8)


def _symbols(
    stream: list[int], tokens: int, tables: Integers, frequencies: Integers
) -> tuple[bool, Integers]:
    """Return whether a stream is a valid encoding, and its symbols `[tokens, width]`; after its
    end, its last word is read repeatedly.
    """
    ends = np.cumsum(frequencies, 1)
    states = [stream[2 * lane] << 16 | stream[2 * lane + 1] for lane in range(LANES)]
    at = 2 * LANES
    symbols = []
    for i in range(tokens * len(tables)):
        table, state = tables[i % len(tables)], states[i % LANES]
        slot = state % (1 << PRECISION_BITS)
        symbol = int(np.searchsorted(ends[table], slot, side="right"))
        frequency = int(frequencies[table, symbol])
        state = (
            frequency * (state >> PRECISION_BITS) + slot - (int(ends[table, symbol]) - frequency)
        )
        if state < LOWEST_STATE:
            state = state << 16 | stream[min(at, len(stream) - 1)]
            at += 1
        states[i % LANES] = state
        symbols.append(symbol)
    is_right = at == len(stream) and all(state == LOWEST_STATE for state in states)
    return is_right, np.array(symbols, np.int64).reshape(tokens, len(tables))


def _whole(symbols: Integers, levels: int, has_deltas: npt.NDArray[np.bool_]) -> Integers:
    """Return values relative to their shift: symbols, or their running sum, modulo `2 * levels +
    1`.
    """
    whole = np.where(has_deltas, np.cumsum(symbols, 0), symbols)
    return (whole + levels) % (2 * levels + 1) - levels


def _restored(whole: Integers, levels: int, scales: torch.Tensor, by_token: bool) -> torch.Tensor:
    if not by_token:
        return torch.from_numpy(whole).float() * scales
    folded = (whole + levels) % (2 * levels + 1) - levels
    return torch.from_numpy(folded).float() / float(levels) * scales[:, None]
