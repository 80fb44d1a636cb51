"""The Triton kernel of `cachegen_decode`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_kernels.arithmetic import EXACT, launching, narrow, size_of, unspecialized
from lmcache_kernels.checks import KINDS, WORD_DTYPES
from lmcache_kernels.codec_shape import (
    DELTA_FLAG,
    LANES,
    LOWEST_STATE,
    PRECISION_BITS,
    STATE_WORDS,
    CodecShape,
    EncodedPlanes,
)
from lmcache_kernels.codec_tables import CodecTables

_LANES = tl.constexpr(LANES)
_STATE_WORDS = tl.constexpr(STATE_WORDS)
_PRECISION_BITS = tl.constexpr(PRECISION_BITS)
_TOTAL = tl.constexpr(1 << PRECISION_BITS)
_LOWEST_STATE = tl.constexpr(LOWEST_STATE)
_DELTA_FLAG = tl.constexpr(DELTA_FLAG)


@triton.jit
def fold(values, levels):  # type: ignore[no-untyped-def]
    """Map integers that exceed the range by at most `2 * levels + 1` into `-levels … levels`,
    modulo that.
    """
    values = tl.where(values > levels, values - (2 * levels + 1), values)
    return tl.where(values < -levels, values + (2 * levels + 1), values)


@triton.jit
def decode_step(states, at, stream, model, shape, active):  # type: ignore[no-untyped-def]
    """Decode one symbol (plus `levels`) in each active lane. No stream content leads to an address
    outside the tables or the stream.

    Args:
        states: uint32, one per lane.
        at: Index of the next word of the stream.
        stream: The words, and the index of the last one that may be read.
        model: `slot_symbol` and `start_and_frequency` of the plane's alphabet, and the number of
            entries of one table.
        shape: Number of each lane's table.
        active: Lanes with a symbol in this step.

    Returns:
        Symbols, states, and the index of the next word.
    """
    words_ptr, last = stream
    slot_symbol_ptr, entries_ptr, table_stride = model
    slot = (states & (_TOTAL - 1)).to(tl.int32)
    symbol = tl.load(slot_symbol_ptr + shape * _TOTAL + slot, mask=active, other=0).to(tl.int32)
    entry = tl.load(entries_ptr + shape * table_stride + symbol, mask=active, other=0).to(
        tl.uint32, bitcast=True
    )
    decoded = (entry & 0xFFFF) * (states >> _PRECISION_BITS) + slot.to(tl.uint32) - (entry >> 16)
    is_empty = active & (decoded < _LOWEST_STATE)
    taken = is_empty.to(tl.int32)
    place = tl.minimum(at + tl.cumsum(taken, 0) - taken, last)
    word = tl.load(words_ptr + place, mask=is_empty, other=0).to(tl.uint32) & 0xFFFF
    decoded = tl.where(is_empty, (decoded << 16) | word, decoded)
    return symbol, tl.where(active, decoded, states), at + tl.sum(taken, 0)


@triton.jit  # type: ignore[untyped-decorator]
def restored(centred, shift, scale, levels, KIND: tl.constexpr, BY_TOKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the restored values as words of the dtype."""
    whole = centred + shift
    if BY_TOKEN:
        whole = fold(whole, levels)
        values = (
            tl.div_rn(
                whole.to(tl.float32), tl.zeros_like(whole).to(tl.float32) + levels.to(tl.float32)
            )
            * scale
        )
    else:
        values = whole.to(tl.float32) * scale
    return narrow(values, KIND)


@triton.jit
def load_channels(columns_ptr, column, active):  # type: ignore[no-untyped-def]
    """Return shift, table and delta (all bits or none) of some columns, given the plane's shifts
    and shapes, `log2` of a group, and the number of tables.
    """
    shifts_ptr, shapes_ptr, group_bits, num_tables = columns_ptr
    shift = tl.load(shifts_ptr + (column >> group_bits), mask=active, other=0).to(tl.int32)
    shape = tl.load(shapes_ptr + (column >> group_bits), mask=active, other=0).to(tl.int32)
    return shift, tl.minimum(shape & (_DELTA_FLAG - 1), num_tables - 1), -(shape // _DELTA_FLAG)


@triton.jit  # type: ignore[untyped-decorator]
def decode_rows(start, stream, model, plane, place, KIND: tl.constexpr, BY_TOKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decode a section whose rows are whole steps, and write its values immediately.

    The values of the previous row, needed for deltas, are kept in a queue: one byte per step of a
    row.

    Args:
        start: States, and the index of the first word after them.
        stream: See `decode_step`.
        model: See `decode_step`.
        plane: Output, scales, columns (see `load_channels`) and levels of the plane.
        place: tokens, channels, first channel, channels of the section.
        KIND: Dtype of the output.
        BY_TOKEN: Whether there is a scale for each token.

    Returns:
        States, and the index of the next word.
    """
    states, at = start
    out_ptr, scales_ptr, columns_ptr, levels = plane
    tokens, channels, first, width = place
    lanes = tl.arange(0, _LANES)
    active = lanes < _LANES
    steps = width // _LANES
    queue = tl.zeros([_LANES], tl.uint64)
    for token in range(tokens):
        scale = tl.load(scales_ptr + token * BY_TOKEN).to(tl.float32, bitcast=True)
        row_ptr = out_ptr + (tl.zeros([1], tl.int64) + token) * channels
        for step in range(steps):
            column = first + step * _LANES + lanes
            shift, shape, delta = load_channels(columns_ptr, column, active)
            symbol, states, at = decode_step(states, at, stream, model, shape, active)
            before = (queue & 0xFF).to(tl.int8).to(tl.int32)
            centred = fold(symbol - levels + (before & delta), levels)
            queue = (queue >> 8) | (
                (centred & 0xFF).to(tl.uint64) << ((steps - 1) * 8).to(tl.uint64)
            )
            tl.store(row_ptr + column, restored(centred, shift, scale, levels, KIND, BY_TOKEN))
    return states, at


@triton.jit
def decode_symbols(start, stream, model, plane, place, symbols_ptr):  # type: ignore[no-untyped-def]
    """Decode the symbols of a section of any width to `symbols_ptr`, uint8 `[tokens * width]`.
    Otherwise like `decode_rows`.
    """
    states, at = start
    columns_ptr = plane[2]
    first, width = place[2], place[3]
    num_symbols = width * place[0]
    for step in range((num_symbols + (_LANES - 1)) // _LANES):
        index = step * _LANES + tl.arange(0, _LANES)
        active = index < num_symbols
        of_columns = load_channels(columns_ptr, first + index % width, active)
        symbol, states, at = decode_step(states, at, stream, model, of_columns[1], active)
        tl.store(symbols_ptr + index, symbol.to(tl.uint8), mask=active)
    return states, at


@triton.jit  # type: ignore[untyped-decorator]
def restore_symbols(symbols_ptr, plane, place, KIND: tl.constexpr, BY_TOKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the values of the symbols from `decode_symbols`. Arguments as in `decode_rows`."""
    out_ptr, scales_ptr, columns_ptr, levels = plane
    tokens, channels, first, width = place
    for begin in range(0, width, _LANES):
        column = begin + tl.arange(0, _LANES)
        active = column < width
        shift, _shape, delta = load_channels(columns_ptr, first + column, active)
        centred = tl.zeros([_LANES], tl.int32)
        for token in range(tokens):
            symbol = tl.load(symbols_ptr + token * width + column, mask=active, other=0).to(
                tl.int32
            )
            scale = tl.load(scales_ptr + token * BY_TOKEN).to(tl.float32, bitcast=True)
            centred = fold(symbol - levels + (centred & delta), levels)
            row_ptr = out_ptr + (tl.zeros([1], tl.int64) + token) * channels + first
            tl.store(
                row_ptr + column,
                restored(centred, shift, scale, levels, KIND, BY_TOKEN),
                mask=active,
            )


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    encoded,
    tables,
    outputs,
    sizes,
    KIND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    IS_DIRECT: tl.constexpr,
):
    """Decode one section from its first symbol to its last, with one warp.

    Args:
        encoded: Words, int64 ends and int32 lengths of the streams, shifts and shapes `[planes,
            groups]`, int32 scales.
        tables: `CodecTables.of_planes`, `slot_symbol` and `start_and_frequency`.
        outputs: Words `[planes, tokens, channels]`; uint8 `[planes * sections]`: 0 if a stream is a
            valid encoding, else 1; and, unless `IS_DIRECT`, uint8 `[planes * sections, tokens *
            channels of a section]`, scratch.
        sizes: Total number of words (at least 1), tables of an alphabet, tokens, channels, groups,
            channels of a section, log2 of the channels of a group (`unspecialized`).
        KIND: Dtype of the output.
        BY_TOKEN: Whether there is a scale for each token.
        IS_DIRECT: See `CodecShape`.
    """
    words_ptr, ends_ptr, lengths_ptr, shifts_ptr, shapes_ptr, scales_ptr = encoded
    planes_ptr, slot_symbol_ptr, entries_ptr = tables
    out_ptr, status_ptr, symbols_ptr = outputs
    num_words, num_tables = size_of(sizes[0]), size_of(sizes[1])
    tokens, channels, groups = size_of(sizes[2]), size_of(sizes[3]), size_of(sizes[4])
    section_channels, group_bits = size_of(sizes[5]), size_of(sizes[6])
    section = tl.program_id(0).to(tl.int64)
    sections = (channels + section_channels - 1) // section_channels
    number = section // sections
    first = (section % sections).to(tl.int32) * section_channels
    width = tl.minimum(channels - first, section_channels)
    levels = tl.load(planes_ptr + number * 4)
    alphabet, first_entry = (
        tl.load(planes_ptr + number * 4 + 1).to(tl.int64),
        tl.load(planes_ptr + number * 4 + 2),
    )
    model = (
        slot_symbol_ptr + alphabet * num_tables * _TOTAL,
        entries_ptr + first_entry,
        tl.load(planes_ptr + number * 4 + 3),
    )
    columns_ptr = shifts_ptr + number * groups, shapes_ptr + number * groups, group_bits, num_tables
    scales_ptr += number * (tokens if BY_TOKEN else 1)
    plane = out_ptr + number * tokens * channels, scales_ptr, columns_ptr, levels
    end = tl.load(ends_ptr + section)
    length = tl.load(lengths_ptr + section)
    begin = end - length
    longest = tokens * width + _LANES * _STATE_WORDS
    is_bad = (begin < 0) | (end > num_words) | (length < _LANES * _STATE_WORDS) | (length > longest)
    begin = tl.minimum(tl.maximum(begin, 0), num_words - 1)
    words_ptr += begin
    last = tl.maximum(tl.minimum(tl.minimum(end, num_words) - begin, longest) - 1, 0).to(tl.int32)
    lanes = tl.arange(0, _LANES) * _STATE_WORDS
    upper = tl.load(words_ptr + tl.minimum(lanes, last)).to(tl.uint32)
    states = (upper << 16) | (
        tl.load(words_ptr + tl.minimum(lanes + 1, last)).to(tl.uint32) & 0xFFFF
    )
    start = states, last * 0 + _LANES * _STATE_WORDS
    place = tokens, channels, first, width
    if IS_DIRECT:
        states, at = decode_rows(start, (words_ptr, last), model, plane, place, KIND, BY_TOKEN)
    else:
        symbols_ptr += section * tokens * section_channels
        states, at = decode_symbols(start, (words_ptr, last), model, plane, place, symbols_ptr)
        tl.debug_barrier()
        restore_symbols(symbols_ptr, plane, place, KIND, BY_TOKEN)
    is_wrong = is_bad | (at != length) | (tl.max((states != _LOWEST_STATE).to(tl.int32), 0) > 0)
    tl.store(status_ptr + section, is_wrong.to(tl.uint8))


def launch(
    encoded: EncodedPlanes,
    scales: torch.Tensor,
    planes: torch.Tensor,
    shape: CodecShape,
    tables: CodecTables,
    out: torch.Tensor,
    by_token: bool,
) -> torch.Tensor:
    """Decode on the current stream, in one launch. Everything except the words has been checked.

    Returns:
        uint8 `[planes * sections]`, see `decode_kernel`.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    num_streams = shape.planes * shape.sections
    status = torch.empty(num_streams, dtype=torch.uint8, device=out.device)
    symbols = torch.empty(
        1 if shape.is_direct else num_streams * shape.tokens * shape.section,
        dtype=torch.uint8,
        device=out.device,
    )
    streams = (
        encoded.words,
        encoded.lengths.cumsum(0, dtype=torch.int64),
        encoded.lengths,
        encoded.shifts,
        encoded.shapes,
        scales,
    )
    sizes = unspecialized(
        len(encoded.words),
        tables.num_tables,
        *shape.sizes[1:],
        shape.groups,
        shape.section,
        shape.group.bit_length() - 1,
    )
    facts = {"KIND": KINDS[out.dtype], "BY_TOKEN": by_token, "IS_DIRECT": shape.is_direct}
    with launching(out.device):
        decode_kernel[(num_streams,)](
            streams,
            (planes, tables.slot_symbol, tables.start_and_frequency),
            (out.view(WORD_DTYPES[out.dtype]), status, symbols),
            sizes,
            **facts,
            **EXACT,
            num_warps=1,
        )
    return status
