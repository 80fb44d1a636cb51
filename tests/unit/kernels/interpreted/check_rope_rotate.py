"""`rope_rotate`: the kernel against the reference, bit for bit, and the reference against its
own words.
"""

from __future__ import annotations

import pytest
import torch
from lmcache_kernels.checks import WORD_DTYPES
from lmcache_kernels.rope_rotate import Rotation, rope_rotate_reference
from lmcache_kernels.rope_rotate.kernel import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (tokens, heads, head_size, rotated dimensions)
SHAPES = (
    (1, 1, 2, 2),
    (5, 2, 32, 32),
    (3, 9, 16, 12),
    (4, 3, 80, 20),
    (2, 8, 128, 128),
    (7, 5, 6, 6),
    (0, 2, 8, 8),
    (2, 0, 8, 8),
)
NUM_GUARDS = 256


def table(generator, num_positions, num_rotated):
    angles = torch.rand(num_positions, num_rotated // 2, generator=generator) * 6.28
    return torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)


def case(shape, dtype, is_interleaved):
    num_tokens, num_heads, head_size, num_rotated = shape
    generator = torch.Generator().manual_seed(hash(shape) & 0xFFFF)
    k = torch.randn(num_tokens, num_heads, head_size, generator=generator).to(DEVICE, dtype)
    source, target = (
        torch.randint(0, size, (num_tokens,), generator=generator).to(DEVICE) for size in (11, 40)
    )
    return k, Rotation(
        source,
        target,
        table(generator, 11, num_rotated),
        table(generator, 40, num_rotated),
        is_interleaved,
    )


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, dtype, is_interleaved):
    k, rotation = case(shape, dtype, is_interleaved)
    reference, pool = (
        torch.full_like(k, 9.0),
        torch.full((k.numel() + NUM_GUARDS,), 7.0, dtype=dtype, device=DEVICE),
    )
    ours = pool[: k.numel()].view(k.shape)
    launch(k, rotation, ours)
    rope_rotate_reference(k, rotation, reference)
    words = WORD_DTYPES[dtype]
    assert torch.equal(ours.view(words), reference.view(words))
    assert (pool[k.numel() :] == 7).all(), "nothing is written behind the last head"


@pytest.mark.parametrize("run", [launch, rope_rotate_reference])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype, run):
    k, rotation = case((4, 3, 80, 20), dtype, False)
    apart = torch.empty_like(k)
    run(k, rotation, apart)
    run(k, rotation, k)
    assert torch.equal(k, apart)


@pytest.mark.parametrize("run", [launch, rope_rotate_reference])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1], ids=["x86", "CUDA", "negative"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(dtype, bits, run):
    k, rotation = case((3, 2, 8, 6), dtype, False)
    k[0, 1, 2], k[1, 0, 7], k[2, 0, 0] = torch.nan, torch.nan, torch.inf
    not_a_number = torch.tensor([bits], dtype=torch.int32, device=DEVICE).view(torch.float32)
    rotation.target_table[rotation.target[1], 1] = not_a_number[0]
    out = torch.full_like(k, 7.0)
    run(k, rotation, out)
    missing = torch.zeros_like(k, dtype=torch.bool)
    missing[0, 1, [2, 5]] = missing[1, 0, 7] = missing[
        rotation.target == rotation.target[1], :, 1
    ] = True
    missing[rotation.target == rotation.target[1], :, 4] = True
    assert torch.equal(out.isnan(), missing)
    assert out[2, 0, [0, 3]].isinf().all()
