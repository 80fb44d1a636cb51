"""The reference of `cachegen_decode`: decodes one symbol after the other, then restores whole
planes; and random streams, on which a kernel is compared with it.
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


def random_planes(
    shape: CodecShape, levels: Sequence[int], alphabets: Mapping[int, Alphabet], seed: int
) -> EncodedPlanes:
    """Return valid streams on the CPU: random shifts, tables and deltas, and symbols that occur as
    often as their tables say.
    """
    random = np.random.default_rng(seed)
    groups = shape.planes, shape.groups
    shapes = random.integers(0, len(alphabets[levels[0]].frequencies), groups)
    streams: list[list[int]] = []
    for plane, top in enumerate(levels):
        frequencies = alphabets[top].frequencies
        tables = np.repeat(shapes[plane], shape.group)[: shape.channels]
        ends = np.cumsum(frequencies[tables], 1)  # of each channel's symbols, in slots
        slots = random.integers(0, 1 << PRECISION_BITS, (shape.tokens, shape.channels, 1))
        symbols = (ends <= slots).sum(2)
        for first in range(0, shape.channels, shape.section):
            columns = slice(first, first + shape.section)
            streams.append(_stream(symbols[:, columns], tables[columns], frequencies))
    words = np.array([word for stream in streams for word in stream], np.uint16).view(np.int16)
    return EncodedPlanes(
        torch.from_numpy(random.integers(-3, 4, groups).astype(np.int16)),
        torch.from_numpy((shapes + DELTA_FLAG * random.integers(0, 2, groups)).astype(np.uint8)),
        torch.tensor([len(stream) for stream in streams], dtype=torch.int32),
        torch.from_numpy(words),
    )


def _stream(symbols: Integers, tables: Integers, frequencies: Integers) -> list[int]:
    """Return the words of a section `[tokens, width]`; column `i` is coded with `tables[i]`."""
    starts = np.cumsum(frequencies, 1) - frequencies
    flat, of_symbol = symbols.ravel().tolist(), np.tile(tables, len(symbols)).tolist()
    states = [LOWEST_STATE] * LANES
    backwards = []
    for i in reversed(range(len(flat))):
        frequency = int(frequencies[of_symbol[i], flat[i]])
        start = int(starts[of_symbol[i], flat[i]])
        state = states[i % LANES]
        if state >= frequency << (31 - PRECISION_BITS):
            backwards.append(state & 0xFFFF)
            state >>= 16
        states[i % LANES] = (state // frequency << PRECISION_BITS) + start + state % frequency
    return [half for state in states for half in (state >> 16, state & 0xFFFF)] + backwards[::-1]


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
