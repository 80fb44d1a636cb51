"""The Triton kernel of `rope_rotate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from lmcache_kernels.arithmetic import EXACT, launching, narrow, widen
from lmcache_kernels.checks import KINDS, WORD_DTYPES

if TYPE_CHECKING:
    from lmcache_kernels.rope_rotate import Rotation

# Not tuned on a GPU: eight heads of 64 pairs are four values a thread.
MAX_BLOCK_HEADS = 8


@triton.jit  # type: ignore[untyped-decorator]
def rope_rotate_kernel(  # type: ignore[no-untyped-def]
    words, positions, tables, sizes, KIND: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Rotate some heads of one token.

    Args:
        words: K `[num_tokens, num_heads, head_size]`; and the output of the same shape.
        positions: int64 `[num_tokens]` of the source and of the target.
        tables: float32 `[num_positions, num_rotated]` of both.
        sizes: num_heads, head_size.
        KIND: Dtype of the words: `checks.KINDS`.
        PAIRS: Number of pairs of dimensions; whether adjacent dimensions form a pair.
        BLOCKS: Powers of two: heads processed per step; at least the number of pairs; at least that
            of other dimensions, 0 for none.
    """
    HALF: tl.constexpr = PAIRS[0]
    IS_INTERLEAVED: tl.constexpr = PAIRS[1]
    BLOCK_HEADS: tl.constexpr = BLOCKS[0]
    BLOCK_PAIRS: tl.constexpr = BLOCKS[1]
    BLOCK_REST: tl.constexpr = BLOCKS[2]
    k_ptr, out_ptr = words
    source_ptr, target_ptr = positions
    source_table_ptr, target_table_ptr = tables
    num_heads, head_size = sizes
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_PAIRS)
    is_pair = pairs < HALF
    source = source_table_ptr + tl.load(source_ptr + token) * (2 * HALF) + pairs
    target = target_table_ptr + tl.load(target_ptr + token) * (2 * HALF) + pairs
    cos_from, sin_from = (
        tl.load(source, mask=is_pair, other=0.0),
        tl.load(source + HALF, mask=is_pair, other=0.0),
    )
    cos_to, sin_to = (
        tl.load(target, mask=is_pair, other=0.0),
        tl.load(target + HALF, mask=is_pair, other=0.0),
    )
    cos = (cos_to * cos_from + sin_to * sin_from)[None, :]
    sin = (sin_to * cos_from - cos_to * sin_from)[None, :]
    rows = (token * num_heads + heads)[:, None] * head_size
    if IS_INTERLEAVED:
        first = rows + 2 * pairs[None, :]
        second = first + 1
    else:
        first = rows + pairs[None, :]
        second = first + HALF
    mask = (heads < num_heads)[:, None] & is_pair[None, :]
    a, b = (
        widen(tl.load(k_ptr + first, mask=mask, other=0), KIND),
        widen(tl.load(k_ptr + second, mask=mask, other=0), KIND),
    )
    tl.store(out_ptr + first, narrow(a * cos - b * sin, KIND), mask=mask)
    tl.store(out_ptr + second, narrow(b * cos + a * sin, KIND), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest_mask = (heads < num_heads)[:, None] & (rest < head_size)[None, :]
        tl.store(
            out_ptr + rows + rest[None, :],
            tl.load(k_ptr + rows + rest[None, :], mask=rest_mask),
            mask=rest_mask,
        )


def launch(k: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> None:
    """Rotate on the current stream, in one launch. The arguments have been checked.

    Raises:
        KernelInputError: There is no kernel for the tensors' device.
    """
    num_tokens, num_heads, head_size = k.shape
    if k.numel() == 0:
        return
    half, num_rest = rotation.num_rotated // 2, head_size - rotation.num_rotated
    block_heads = min(MAX_BLOCK_HEADS, int(triton.next_power_of_2(num_heads)))
    words = WORD_DTYPES[k.dtype]
    blocks = (
        block_heads,
        int(triton.next_power_of_2(half)),
        int(triton.next_power_of_2(num_rest)) if num_rest else 0,
    )
    with launching(k.device):
        rope_rotate_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
            (k.view(words), out.view(words)),
            (rotation.source, rotation.target),
            (rotation.source_table, rotation.target_table),
            (num_heads, head_size),
            KIND=KINDS[k.dtype],
            PAIRS=(half, rotation.is_interleaved),
            BLOCKS=blocks,
            **EXACT,
        )
