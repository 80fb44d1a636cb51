"""`rope_rotate`: the kernel against the reference, bit for bit, and the reference against its own words."""

from __future__ import annotations

import pytest
import torch
from lmcache_kernels.rope_rotate import Rotation, rope_rotate_reference
from lmcache_kernels.rope_rotate.kernel import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (tokens, heads, head_size, rotated dimensions)
SHAPES = ((1, 1, 2, 2), (5, 2, 32, 32), (3, 9, 16, 12), (4, 3, 80, 20), (2, 8, 128, 128), (7, 5, 6, 6), (0, 2, 8, 8))


def table(generator, num_positions, num_rotated):
    angles = torch.rand(num_positions, num_rotated // 2, generator=generator) * 6.28
    return torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)


def case(shape, dtype, is_interleaved):
    num_tokens, num_heads, head_size, num_rotated = shape
    generator = torch.Generator().manual_seed(hash(shape) & 0xFFFF)
    k = torch.randn(num_tokens, num_heads, head_size, generator=generator).to(DEVICE, dtype)
    source, target = (torch.randint(0, size, (num_tokens,), generator=generator).to(DEVICE) for size in (11, 40))
    return k, Rotation(source, target, table(generator, 11, num_rotated), table(generator, 40, num_rotated), is_interleaved)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, dtype, is_interleaved):
    k, rotation = case(shape, dtype, is_interleaved)
    ours, reference = torch.full_like(k, 7.0), torch.full_like(k, 9.0)
    launch(k, rotation, ours)
    rope_rotate_reference(k, rotation, reference)
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("run", [launch, rope_rotate_reference])
def test_in_place(run):
    k, rotation = case((4, 3, 80, 20), torch.float32, False)
    apart = torch.empty_like(k)
    run(k, rotation, apart)
    run(k, rotation, k)
    assert torch.equal(k, apart)
