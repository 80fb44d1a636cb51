"""The Triton kernels of `cachegen_quantize`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_kernels.arithmetic import EXACT, launching, narrow, widen
from lmcache_kernels.checks import KINDS, WORD_DTYPES
from lmcache_kernels.codec_arithmetic import magnitude_bits, rounded, whole_root

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Values, scales, errors and status."""

# Not tuned on a GPU: a row of 1,024 channels is one block of eight values per thread.
MAX_BLOCK = 1024
TILE_TOKENS = tl.constexpr(8)
TILE_CHANNELS = tl.constexpr(64)
_UNIT = tl.constexpr(32767)
_MAX_SPREAD = tl.constexpr(252)
_SMALLEST_BITS = tl.constexpr(27 << 23)
_LARGEST_BITS = tl.constexpr(227 << 23)
_LARGEST_HALF_BITS = tl.constexpr(142 << 23)
_ONE_BITS = tl.constexpr(127 << 23)


@triton.jit  # type: ignore[untyped-decorator]
def usable_scale(bits, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether the largest magnitude of a row or plane, as bits, is 0 or a usable divisor,
    and the divisor: the magnitude, or 1.
    """
    is_usable = (bits >= _SMALLEST_BITS) & (bits <= LIMIT)
    return is_usable | (bits == 0), tl.where(is_usable, bits, _ONE_BITS).to(
        tl.float32, bitcast=True
    )


@triton.jit  # type: ignore[untyped-decorator]
def usable_plane(bits, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `usable_scale` of a plane, whose restored values may be half a step larger and must
    stay finite in float16.
    """
    return usable_scale(bits, _LARGEST_HALF_BITS if KIND == 1 else _LARGEST_BITS)


@triton.jit  # type: ignore[untyped-decorator]
def largest_of_row(raw_ptr, channels, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude in the row that begins at `raw_ptr`."""
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, channels, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        raw = tl.load(raw_ptr + columns, mask=columns < channels, other=0)
        largest = tl.maximum(largest, magnitude_bits(widen(raw, KIND)))
    return tl.max(largest, 0)


@triton.jit  # type: ignore[untyped-decorator]
def count_errors(sums, x, restored, unit, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a block of values and their restored ones to `(largest error, squared errors, squared
    values)`, in units of 1/unit.
    """
    largest, squares, power = sums
    ours = widen(narrow(restored, KIND), KIND)
    error = rounded(tl.abs(x - ours) * unit).to(tl.int32)
    value = rounded(tl.abs(x) * unit).to(tl.int32)
    error_squares, value_squares = error.to(tl.int64) * error, value.to(tl.int64) * value
    return tl.maximum(largest, error), squares + error_squares, power + value_squares


@triton.jit
def add_errors(errors_ptr, sums):  # type: ignore[no-untyped-def]
    """Combine a block's sums with the three sums of a plane. They are integers, so the order of
    rows does not matter.
    """
    largest, squares, power = sums
    tl.atomic_max(errors_ptr, tl.max(largest, 0).to(tl.int64))
    tl.atomic_add(errors_ptr + 1, tl.sum(squares, 0))
    tl.atomic_add(errors_ptr + 2, tl.sum(power, 0))


@triton.jit  # type: ignore[untyped-decorator]
def by_token_kernel(raw_ptr, levels_ptr, outputs, sizes, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise one row: read it for its largest magnitude, and again, from the cache, for its
    values.

    Args:
        raw_ptr: Words `[planes, tokens, channels]`.
        levels_ptr: uint8 `[planes]`.
        outputs: int16 `[planes, tokens, channels]`, int32 `[planes, tokens]`, int64 `[planes, 3]`
            of zeros, int32 `[planes]` of zeros.
        sizes: tokens, channels.
        KIND: Dtype of the words: `checks.KINDS`.
        BLOCK: Channels processed per step.
    """
    values_ptr, scales_ptr, errors_ptr, status_ptr = outputs
    tokens, channels = sizes
    row = tl.program_id(0).to(tl.int64)
    plane = row // tokens
    start = row * channels
    bits = largest_of_row(raw_ptr + start, channels, KIND, BLOCK)
    tl.store(scales_ptr + row, bits)
    is_usable, scale = usable_scale(bits, _LARGEST_BITS)
    tl.store(status_ptr + plane, 1, mask=is_usable == 0)
    levels = tl.load(levels_ptr + plane).to(tl.int32)
    steps = levels.to(tl.float32)
    unit = tl.div_rn(_UNIT * 1.0, scale)
    sums = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for first in range(0, channels, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = widen(
            tl.load(raw_ptr + start + columns, mask=(columns < channels) & is_usable, other=0), KIND
        )
        whole = rounded(tl.div_rn(x * steps, scale) + steps)
        tl.store(
            values_ptr + start + columns,
            (whole.to(tl.int32) - levels).to(tl.int16),
            mask=columns < channels,
        )
        sums = count_errors(sums, x, tl.div_rn(whole - steps, steps) * scale, unit, KIND)
    add_errors(errors_ptr + plane * 3, sums)


@triton.jit  # type: ignore[untyped-decorator]
def plane_largest_kernel(raw_ptr, largest_ptr, sizes, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise int32 `[planes]`, initially zeros, to the bits of each plane's largest magnitude. One
    row per program.
    """
    tokens, channels = sizes
    row = tl.program_id(0).to(tl.int64)
    tl.atomic_max(
        largest_ptr + row // tokens, largest_of_row(raw_ptr + row * channels, channels, KIND, BLOCK)
    )


@triton.jit  # type: ignore[untyped-decorator]
def plane_spread_kernel(raw_ptr, largest_ptr, spread_ptr, sizes, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Measure `TILE_CHANNELS` channels over all tokens, in 1/32767 of the plane's largest
    magnitude.

    Args:
        raw_ptr: Words `[planes, tokens, channels]`.
        largest_ptr: int32 `[planes]`.
        spread_ptr: int64 `[planes, 2]`, initially zeros: the sum of the channels' variances is
            added to the first; the second is raised to the largest distance between two values of a
            channel.
        sizes: tokens, channels.
        KIND: Dtype of the words.
    """
    tokens, channels = sizes
    plane = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)[None, :]
    is_usable, scale = usable_plane(tl.load(largest_ptr + plane), KIND)
    unit = tl.div_rn(_UNIT * 1.0, scale)
    total = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int64)
    squares = tl.zeros([TILE_TOKENS, TILE_CHANNELS], tl.int64)
    low = tl.full([TILE_TOKENS, TILE_CHANNELS], _UNIT, tl.int32)
    high = tl.full([TILE_TOKENS, TILE_CHANNELS], -_UNIT, tl.int32)
    for first in range(0, tokens, TILE_TOKENS):
        rows = first + tl.arange(0, TILE_TOKENS)[:, None]
        mask = (rows < tokens) & (columns < channels) & is_usable
        x = widen(
            tl.load(raw_ptr + (plane * tokens + rows) * channels + columns, mask=mask, other=0),
            KIND,
        )
        whole = rounded(x * unit).to(tl.int32)
        total += whole
        squares += whole.to(tl.int64) * whole
        low = tl.minimum(low, tl.where(mask, whole, _UNIT))
        high = tl.maximum(high, tl.where(mask, whole, -_UNIT))
    of_channel = tl.sum(total, 0)
    count = tl.full([TILE_CHANNELS], 0, tl.int64) + tokens
    variance = (count * tl.sum(squares, 0) - of_channel * of_channel) // (count * count)
    tl.atomic_add(spread_ptr + plane * 2, tl.sum(variance, 0))
    distance = tl.maximum(tl.max(high, 0) - tl.min(low, 0), 0)
    tl.atomic_max(spread_ptr + plane * 2 + 1, tl.max(distance, 0).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def by_plane_kernel(raw_ptr, facts, outputs, sizes, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise one row in steps derived from the measurements of its plane.

    Args:
        raw_ptr: Words `[planes, tokens, channels]`.
        facts: Results of `plane_largest_kernel` and `plane_spread_kernel`.
        outputs: int16 `[planes, tokens, channels]`, int32 `[planes, 1]`, int64 `[planes, 3]` of
            zeros, int32 `[planes]`.
        sizes: tokens, channels, fineness.
        KIND: Dtype of the words.
        BLOCK: Channels processed per step.
    """
    largest_ptr, spread_ptr = facts
    values_ptr, scales_ptr, errors_ptr, status_ptr = outputs
    tokens, channels, fineness = sizes
    row = tl.program_id(0).to(tl.int64)
    plane = row // tokens
    start = row * channels
    bits = tl.load(largest_ptr + plane)
    is_usable, largest = usable_plane(bits, KIND)
    unit = tl.div_rn(_UNIT * 1.0, largest)
    square = (tl.load(spread_ptr + plane * 2) // channels) * fineness * fineness
    step_units = tl.maximum(whole_root(square) >> 8, 1)
    step_units = tl.maximum(
        step_units, (tl.load(spread_ptr + plane * 2 + 1) + (_MAX_SPREAD - 1)) // _MAX_SPREAD
    )
    step = step_units.to(tl.float32) * tl.div_rn(largest, _UNIT * 1.0)
    if row == plane * tokens:
        tl.store(scales_ptr + plane, tl.where(bits == 0, 0, step.to(tl.int32, bitcast=True)))
        tl.store(status_ptr + plane, (is_usable == 0).to(tl.int32))
    sums = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for first in range(0, channels, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = widen(
            tl.load(raw_ptr + start + columns, mask=(columns < channels) & is_usable, other=0), KIND
        )
        whole = rounded(tl.div_rn(x, step))
        tl.store(
            values_ptr + start + columns, whole.to(tl.int32).to(tl.int16), mask=columns < channels
        )
        sums = count_errors(sums, x, whole * step, unit, KIND)
    add_errors(errors_ptr + plane * 3, sums)


def launch_by_token(x: torch.Tensor, levels: torch.Tensor, outputs: Outputs) -> None:
    """Quantise by token on the current stream, in one launch. The arguments have been checked;
    errors and status are zeros.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    planes, tokens, channels = x.shape
    fixed = {"KIND": KINDS[x.dtype], "BLOCK": _block(channels)}
    with launching(x.device):
        by_token_kernel[(planes * tokens,)](
            x.view(WORD_DTYPES[x.dtype]), levels, outputs, (tokens, channels), **fixed, **EXACT
        )


def launch_by_plane(x: torch.Tensor, fineness: int, outputs: Outputs) -> None:
    """Quantise by plane on the current stream, in three launches. The arguments have been checked;
    errors are zeros.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    planes, tokens, channels = x.shape
    raw, block = x.view(WORD_DTYPES[x.dtype]), _block(channels)
    largest = torch.zeros(planes, dtype=torch.int32, device=x.device)
    spread = torch.zeros((planes, 2), dtype=torch.int64, device=x.device)
    fixed = {"KIND": KINDS[x.dtype]} | EXACT
    with launching(x.device):
        plane_largest_kernel[(planes * tokens,)](
            raw, largest, (tokens, channels), BLOCK=block, **fixed
        )
        tiles = triton.cdiv(channels, int(TILE_CHANNELS.value))
        plane_spread_kernel[(planes, tiles)](raw, largest, spread, (tokens, channels), **fixed)
        by_plane_kernel[(planes * tokens,)](
            raw, (largest, spread), outputs, (tokens, channels, fineness), BLOCK=block, **fixed
        )


def _block(channels: int) -> int:
    return min(MAX_BLOCK, int(triton.next_power_of_2(channels)))
