"""The Triton kernels of `blend_select`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from lmcache_kernels.arithmetic import EXACT, launching, widen
from lmcache_kernels.blend_select.reference import INFINITE
from lmcache_kernels.checks import KINDS, WORD_DTYPES

# Not tuned on a GPU: eight values per thread.
MAX_BLOCK = 1024
_NUM_BITS = tl.constexpr(31)
_INFINITE = tl.constexpr(INFINITE)


@triton.jit  # type: ignore[untyped-decorator]
def deviation_kernel(  # type: ignore[no-untyped-def]
    fresh_ptr,
    retrieved_ptr,
    valid_ptr,
    deviation_ptr,
    channels,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the squared distance of one token's rows.

    Args:
        fresh_ptr: Words `[num_tokens, channels]`.
        retrieved_ptr: Words `[num_tokens, channels]`.
        valid_ptr: uint8 `[num_tokens]`.
        deviation_ptr: float32 `[num_tokens]`, written.
        channels: Length of a row.
        KIND: Dtype of the words: `checks.KINDS`.
        BLOCK: Channels processed per step.
    """
    token = tl.program_id(0).to(tl.int64)
    is_valid = tl.load(valid_ptr + token) != 0
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, channels, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = (columns < channels) & is_valid
        ours = widen(tl.load(fresh_ptr + token * channels + columns, mask=mask, other=0), KIND)
        theirs = widen(
            tl.load(retrieved_ptr + token * channels + columns, mask=mask, other=0), KIND
        )
        sums += (ours - theirs) * (ours - theirs)
    tl.store(deviation_ptr + token, tl.sum(sums, 0))


@triton.jit
def load_ranks(bits_ptr, valid_ptr, tokens, end):  # type: ignore[no-untyped-def]
    """Return the ranks of some tokens by deviation, like `reference.ranks_of`; -1 if not valid, or
    from `end` on.
    """
    is_candidate = (tl.load(valid_ptr + tokens, mask=tokens < end, other=0) != 0) & (tokens < end)
    bits = tl.load(bits_ptr + tokens, mask=is_candidate, other=0)
    return tl.where(is_candidate, tl.minimum(bits & 0x7FFFFFFF, _INFINITE + 1), -1)


@triton.jit  # type: ignore[untyped-decorator]
def select_kernel(  # type: ignore[no-untyped-def]
    bits_ptr, valid_ptr, starts_ptr, counts_ptr, selected_ptr, num_tail_tokens, BLOCK: tl.constexpr
):
    """Select the tokens of one request.

    Args:
        bits_ptr: Bits of the deviations, int32 `[num_tokens]`.
        valid_ptr: uint8 `[num_tokens]`.
        starts_ptr: int64 `[num_requests + 1]`.
        counts_ptr: int64 `[num_requests]`.
        selected_ptr: uint8 `[num_tokens]`, written.
        num_tail_tokens: Tokens at the end that are always selected.
        BLOCK: Tokens processed per step.
    """
    request = tl.program_id(0)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    tail = end - num_tail_tokens
    count = tl.load(counts_ptr + request)
    threshold = tl.full([], 0, tl.int32)
    bit = tl.full([], 1 << 30, tl.int32)
    for _step in range(_NUM_BITS):
        candidate = threshold | bit
        reached = tl.full([], 0, tl.int64)
        for first in range(start, end, BLOCK):
            ranks = load_ranks(bits_ptr, valid_ptr, first + tl.arange(0, BLOCK), tail)
            reached += tl.sum((ranks >= candidate).to(tl.int64), 0)
        threshold = tl.where(reached >= count, candidate, threshold)
        bit = bit >> 1
    left = count
    for first in range(start, end, BLOCK):
        ranks = load_ranks(bits_ptr, valid_ptr, first + tl.arange(0, BLOCK), tail)
        left -= tl.sum((ranks > threshold).to(tl.int64), 0)
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        ranks = load_ranks(bits_ptr, valid_ptr, tokens, tail)
        is_equal = (ranks == threshold).to(tl.int64)
        is_chosen = (ranks > threshold) | ((is_equal != 0) & (tl.cumsum(is_equal, 0) <= left))
        is_chosen = is_chosen | (ranks < 0) | (ranks >= _INFINITE)
        tl.store(selected_ptr + tokens, is_chosen.to(tl.uint8), mask=tokens < end)
        left -= tl.sum(is_equal, 0)


def launch_deviation(
    fresh: torch.Tensor, retrieved: torch.Tensor, is_valid: torch.Tensor, deviation: torch.Tensor
) -> None:
    """Fill float32 `[num_tokens]` on the current stream. The arguments have been checked.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    num_tokens, channels = fresh.shape
    if num_tokens == 0:
        return
    words = WORD_DTYPES[fresh.dtype]
    fixed = {
        "KIND": KINDS[fresh.dtype],
        "BLOCK": min(MAX_BLOCK, int(triton.next_power_of_2(max(1, channels)))),
    }
    with launching(fresh.device):
        deviation_kernel[(num_tokens,)](
            fresh.view(words),
            retrieved.view(words),
            is_valid.view(torch.uint8),
            deviation,
            channels,
            **fixed,
            **EXACT,
        )


def launch_select(
    deviation: torch.Tensor,
    is_valid: torch.Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    num_tail_tokens: int,
    selected: torch.Tensor,
) -> None:
    """Fill booleans `[num_tokens]` on the current stream. The arguments have been checked.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    if not counts or len(deviation) == 0:
        return
    longest = max(end - start for start, end in pairwise(starts))
    bounds = torch.tensor(starts, dtype=torch.int64).to(deviation.device, non_blocking=True)
    wanted = torch.tensor(counts, dtype=torch.int64).to(deviation.device, non_blocking=True)
    block = min(MAX_BLOCK, int(triton.next_power_of_2(longest)))
    with launching(deviation.device):
        select_kernel[(len(counts),)](
            deviation.view(torch.int32),
            is_valid.view(torch.uint8),
            bounds,
            wanted,
            selected.view(torch.uint8),
            num_tail_tokens,
            BLOCK=block,
        )
