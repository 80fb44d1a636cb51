"""The Triton kernels of `cachegen_encode`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_kernels.arithmetic import launching
from lmcache_kernels.codec_arithmetic import fold
from lmcache_kernels.codec_shape import DELTA_FLAG, LANES, LOWEST_STATE, PRECISION_BITS, CodecShape
from lmcache_kernels.codec_tables import CodecTables

# Not tuned on a GPU: 16 rows of 64 channels, eight values per thread.
TILE_TOKENS = tl.constexpr(16)
TILE_CHANNELS = tl.constexpr(64)
COPY_WORDS = tl.constexpr(1024)
_LANES = tl.constexpr(LANES)
_TOTAL = tl.constexpr(1 << PRECISION_BITS)
_FULL_BITS = tl.constexpr(31 - PRECISION_BITS)
_LOWEST_STATE = tl.constexpr(LOWEST_STATE)
_DELTA_FLAG = tl.constexpr(DELTA_FLAG)
_VARIANCE_UNIT = tl.constexpr(256)
_MEAN_OFFSET = tl.constexpr(65536)


@triton.jit  # type: ignore[untyped-decorator]
def by_group(of_channel, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return values of `TILE_CHANNELS` channels as `[groups, GROUP]`."""
    return tl.reshape(of_channel, [TILE_CHANNELS // GROUP, GROUP])


@triton.jit
def load_tile(values_ptr, first, columns, sizes):  # type: ignore[no-untyped-def]
    """Load rows `first …` of some columns of a plane as int32, 0 outside the plane; return them
    with the mask of those inside.
    """
    tokens, channels = sizes
    rows = first + tl.arange(0, TILE_TOKENS)[:, None]
    mask = (rows >= 0) & (rows < tokens) & (columns < channels)
    return (
        tl.load(values_ptr + rows.to(tl.int64) * channels + columns, mask=mask, other=0).to(
            tl.int32
        ),
        mask,
    )


@triton.jit  # type: ignore[untyped-decorator]
def group_shift(values_ptr, columns, sizes, levels, WRAPS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rounded mean of each group (halves up), int32 `[groups]`; unless values wrap,
    moved until all of them are within `levels` of it.
    """
    tokens, channels = sizes
    total = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int32)
    low = tl.full([TILE_TOKENS, TILE_CHANNELS], 32767, tl.int32)
    high = tl.full([TILE_TOKENS, TILE_CHANNELS], -32768, tl.int32)
    for first in range(0, tokens, TILE_TOKENS):
        tile, mask = load_tile(values_ptr, first, columns[None, :], sizes)
        total += tile
        low = tl.minimum(low, tl.where(mask, tile, 32767))
        high = tl.maximum(high, tl.where(mask, tile, -32768))
    whole = tl.sum(by_group(tl.sum(total, 0).to(tl.int64), GROUP), 1)
    count = tl.maximum(tl.sum(by_group((columns < channels).to(tl.int64), GROUP), 1), 1) * tokens
    # Division rounds towards zero: make the dividend positive before, and undo that afterwards.
    shift = ((2 * whole + count + 2 * count * _MEAN_OFFSET) // (2 * count) - _MEAN_OFFSET).to(
        tl.int32
    )
    if not WRAPS:
        lowest, highest = (
            tl.min(by_group(tl.min(low, 0), GROUP), 1),
            tl.max(by_group(tl.max(high, 0), GROUP), 1),
        )
        shift = tl.maximum(tl.minimum(shift, lowest + levels), highest - levels)
    return shift, count


@triton.jit
def measure(values_ptr, columns, sizes, levels, shift):  # type: ignore[no-untyped-def]
    """Return for each channel, int32: the sums of squares relative to its shift and of its deltas,
    and the largest magnitudes of both.
    """
    tokens = sizes[0]
    squares = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int32)
    delta_squares = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int32)
    largest = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int32)
    largest_delta = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int32)
    for first in range(0, tokens, TILE_TOKENS):
        tile, mask = load_tile(values_ptr, first, columns[None, :], sizes)
        before, is_there = load_tile(values_ptr, first - 1, columns[None, :], sizes)
        centred = fold(tile - shift[None, :], levels)
        delta = fold(centred - tl.where(is_there, fold(before - shift[None, :], levels), 0), levels)
        centred, delta = tl.where(mask, centred, 0), tl.where(mask, delta, 0)
        squares += centred * centred
        delta_squares += delta * delta
        largest = tl.maximum(largest, tl.abs(centred))
        largest_delta = tl.maximum(largest_delta, tl.abs(delta))
    return (
        tl.sum(squares, 0),
        tl.sum(delta_squares, 0),
        tl.max(largest, 0),
        tl.max(largest_delta, 0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(  # type: ignore[no-untyped-def]
    values_ptr, planes_ptr, choice, outputs, sizes, WRAPS: tl.constexpr, GROUP: tl.constexpr
):
    """Choose shift, delta and table of the groups in `TILE_CHANNELS` channels of a plane.

    Args:
        values_ptr: int16 `[planes, tokens, channels]`.
        planes_ptr: `CodecTables.of_planes`.
        choice: `CodecTables.choice`, and its number of widths.
        outputs: int16 and uint8 `[planes, groups]`: shifts and shapes.
        sizes: tokens, channels, groups.
        WRAPS: Whether values are modulo `2 * levels + 1`.
        GROUP: Channels of a group.
    """
    choice_ptr, num_widths = choice
    shifts_ptr, shapes_ptr = outputs
    tokens, channels, groups = sizes
    plane = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    values_ptr += plane * tokens * channels
    levels = tl.load(planes_ptr + plane * 4)
    choice_ptr += tl.load(planes_ptr + plane * 4 + 1).to(tl.int64) * 2 * num_widths
    shift, count = group_shift(values_ptr, columns, (tokens, channels), levels, WRAPS, GROUP)
    shift_of = tl.reshape(
        tl.broadcast_to(shift[:, None], [TILE_CHANNELS // GROUP, GROUP]), [TILE_CHANNELS]
    )
    squares, delta_squares, largest, largest_delta = measure(
        values_ptr, columns, (tokens, channels), levels, shift_of
    )
    about_shift = tl.sum(by_group(squares.to(tl.int64), GROUP), 1)
    of_deltas = tl.sum(by_group(delta_squares.to(tl.int64), GROUP), 1)
    is_delta = of_deltas * 16 < about_shift * 15
    variance = tl.where(is_delta, of_deltas, about_shift) * _VARIANCE_UNIT // count
    reach = tl.where(
        is_delta, tl.max(by_group(largest_delta, GROUP), 1), tl.max(by_group(largest, GROUP), 1)
    )
    width = tl.zeros([TILE_CHANNELS // GROUP], tl.int32)
    for i in range(num_widths - 1):
        width += (variance > tl.load(choice_ptr + i)).to(tl.int32)
    is_wide = reach > tl.load(choice_ptr + num_widths + width)
    shape = 2 * width + is_wide.to(tl.int32) + tl.where(is_delta, _DELTA_FLAG, 0)
    group = tl.program_id(1) * (TILE_CHANNELS // GROUP) + tl.arange(0, TILE_CHANNELS // GROUP)
    tl.store(shifts_ptr + plane * groups + group, shift.to(tl.int16), mask=group < groups)
    tl.store(shapes_ptr + plane * groups + group, shape.to(tl.uint8), mask=group < groups)


@triton.jit  # type: ignore[untyped-decorator]
def load_symbols(values_ptr, model, token, column, channels, active, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the symbols (plus `levels`) of a step's lanes, and the tables that they are coded
    with.
    """
    shifts_ptr, shapes_ptr, levels = model
    place = values_ptr + token.to(tl.int64) * channels + column
    value = tl.load(place, mask=active, other=0).to(tl.int32)
    before = tl.load(place - channels, mask=active & (token > 0), other=0).to(tl.int32)
    shift = tl.load(shifts_ptr + column // GROUP, mask=active, other=0).to(tl.int32)
    shape = tl.load(shapes_ptr + column // GROUP, mask=active, other=0).to(tl.int32)
    has_delta = (token > 0) & (shape >= _DELTA_FLAG)
    expected = tl.where(has_delta, fold(before - shift, levels), 0)
    symbol = fold(fold(value - shift, levels) - expected, levels) + levels
    return symbol, shape & (_DELTA_FLAG - 1)


@triton.jit
def encode_step(states, at, packed, stream_ptr, active):  # type: ignore[no-untyped-def]
    """Code one symbol in each active lane, last lane first; return the states and the new start of
    the stream.
    """
    frequency = (packed & 0x1FFF).to(tl.uint32)
    start = ((packed >> 13) & 0xFFF).to(tl.uint32)
    is_full = active & ((states >> _FULL_BITS) >= frequency)
    written = is_full.to(tl.int32)
    at -= tl.sum(written, 0)
    tl.store(stream_ptr + at + tl.cumsum(written, 0) - written, states.to(tl.int16), mask=is_full)
    states = tl.where(is_full, states >> 16, states)
    quotient = ((states.to(tl.uint64) * (packed >> 32)) >> (31 + ((packed >> 25) & 0x7F))).to(
        tl.uint32
    )
    coded = states + start + quotient * (_TOTAL - frequency)
    return tl.where(active, coded, states), at


@triton.jit  # type: ignore[untyped-decorator]
def encode_kernel(  # type: ignore[no-untyped-def]
    values_ptr, model, coder_ptr, outputs, sizes, SECTION: tl.constexpr, GROUP: tl.constexpr
):
    """Encode one section from its last symbol to its first, with one warp.

    Args:
        values_ptr: int16 `[planes, tokens, channels]`.
        model: `CodecTables.of_planes`, shifts and shapes `[planes, groups]`.
        coder_ptr: `CodecTables.coder`.
        outputs: int16 `[planes * sections, stride]`: each stream, at the end of its row; int32
            `[planes * sections]`: number of words of each stream.
        sizes: tokens, channels, groups, stride of the streams.
        SECTION: Channels of a section.
        GROUP: Channels of a group.
    """
    planes_ptr, shifts_ptr, shapes_ptr = model
    streams_ptr, lengths_ptr = outputs
    tokens, channels, groups, stride = sizes
    section = tl.program_id(0).to(tl.int64)
    sections = tl.cdiv(channels, SECTION)
    plane = section // sections
    first = (section % sections).to(tl.int32) * SECTION
    width = tl.minimum(SECTION, channels - first)
    levels = tl.load(planes_ptr + plane * 4)
    first_entry, table_stride = (
        tl.load(planes_ptr + plane * 4 + 2),
        tl.load(planes_ptr + plane * 4 + 3),
    )
    of_plane = shifts_ptr + plane * groups, shapes_ptr + plane * groups, levels
    values_ptr += plane * tokens * channels
    streams_ptr += section * stride
    lanes = tl.arange(0, _LANES)
    states = tl.full([_LANES], _LOWEST_STATE, tl.uint32)
    num_symbols = width * tokens
    num_steps = (num_symbols + (_LANES - 1)) // _LANES
    at = num_symbols * 0 + stride
    for back in range(num_steps):
        index = (num_steps - 1 - back) * _LANES + lanes
        active = index < num_symbols
        token = index // width
        column = first + index - token * width
        symbol, shape = load_symbols(values_ptr, of_plane, token, column, channels, active, GROUP)
        entry = (
            first_entry + shape * table_stride + tl.minimum(tl.maximum(symbol, 0), table_stride - 1)
        )
        packed = tl.load(coder_ptr + entry, mask=active, other=0).to(tl.uint64, bitcast=True)
        states, at = encode_step(states, at, packed, streams_ptr, active)
    at -= 2 * _LANES
    tl.store(streams_ptr + at + 2 * lanes, (states >> 16).to(tl.int16))
    tl.store(streams_ptr + at + 2 * lanes + 1, states.to(tl.int16))
    tl.store(lengths_ptr + section, stride - at)


@triton.jit
def gather_streams_kernel(streams_ptr, lengths_ptr, ends_ptr, words_ptr, stride):  # type: ignore[no-untyped-def]
    """Copy one stream, at the end of its row of `[sections, stride]`, to its place in `words`."""
    section = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + section)
    source = streams_ptr + (section + 1) * stride - length
    target = words_ptr + tl.load(ends_ptr + section) - length
    for first in range(0, length, COPY_WORDS):
        words = first + tl.arange(0, COPY_WORDS)
        tl.store(
            target + words,
            tl.load(source + words, mask=words < length, other=0),
            mask=words < length,
        )


def launch_choose(
    values: torch.Tensor, planes: torch.Tensor, shape: CodecShape, tables: CodecTables, wraps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose shift and shape of each group, on the current stream. The arguments have been checked.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    shifts = torch.empty((shape.planes, shape.groups), dtype=torch.int16, device=values.device)
    shapes = torch.empty((shape.planes, shape.groups), dtype=torch.uint8, device=values.device)
    grid = shape.planes, triton.cdiv(shape.channels, int(TILE_CHANNELS.value))
    sizes = shape.tokens, shape.channels, shape.groups
    choice = tables.choice, tables.num_tables // 2
    with launching(values.device):
        choose_kernel[grid](
            values, planes, choice, (shifts, shapes), sizes, WRAPS=wraps, GROUP=shape.group
        )
    return shifts, shapes


def launch_encode(
    values: torch.Tensor,
    model: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shape: CodecShape,
    tables: CodecTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode on the current stream; return streams `[planes * sections, max_words]`, each at the
    end of its row, and their lengths.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    num_streams = shape.planes * shape.sections
    streams = torch.empty((num_streams, shape.max_words), dtype=torch.int16, device=values.device)
    lengths = torch.empty(num_streams, dtype=torch.int32, device=values.device)
    sizes = shape.tokens, shape.channels, shape.groups, shape.max_words
    with launching(values.device):
        encode_kernel[(num_streams,)](
            values,
            model,
            tables.coder,
            (streams, lengths),
            sizes,
            SECTION=shape.section,
            GROUP=shape.group,
            num_warps=1,
        )
    return streams, lengths


def launch_gather(streams: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the streams concatenated. Waits for the device to learn their lengths.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    ends = lengths.cumsum(0, dtype=torch.int64)
    words = torch.empty(int(ends[-1]), dtype=torch.int16, device=streams.device)
    with launching(streams.device):
        gather_streams_kernel[(len(streams),)](streams, lengths, ends, words, streams.shape[1])
    return words
