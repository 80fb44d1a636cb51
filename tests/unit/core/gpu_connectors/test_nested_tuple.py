"""What the connector for nested tuples has beyond its contract (`tests/contract/test_gpu_connectors.py`)."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator

LAYERS, TOKENS, HEADS, HEAD_SIZE = 3, 11, 2, 5
HIDDEN = HEADS * HEAD_SIZE


@pytest.fixture
def connector():
    return VLLMNestedTupleGPUConnector(HIDDEN, LAYERS)


@pytest.fixture
def allocator():
    allocator = HostMemoryAllocator(1 << 16)
    yield allocator
    allocator.check_integrity()
    assert allocator.used_bytes == 0


def caches(dtype=torch.bfloat16, seed=0, shape=(TOKENS, HEADS, HEAD_SIZE)):
    random = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return tuple(tuple(torch.randint(0, 256, size, dtype=torch.uint8, generator=random).view(dtype) for _ in "KV") for _ in range(LAYERS))


def snapshot(layers):
    return [side.view(torch.uint8).clone() for layer in layers for side in layer]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_split_into_heads_is_the_engines_business(connector, allocator):
    flat = caches(shape=(TOKENS, HIDDEN))
    with allocator.allocate(connector.get_shape(TOKENS), torch.bfloat16) as memory:
        connector.from_gpu(memory, 0, TOKENS, kvcaches=flat)
        target = caches(seed=5)
        connector.to_gpu(memory, 0, TOKENS, kvcaches=target)
    assert same([t.flatten(1) for t in snapshot(target)], snapshot(flat))


def test_strided_layers_are_read_and_written(connector, allocator):
    wide = [torch.zeros(TOKENS, HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    target = [tuple(t[..., :HEAD_SIZE] for t in wide[2 * i : 2 * i + 2]) for i in range(LAYERS)]
    source = caches()
    with allocator.allocate(connector.get_shape(TOKENS), torch.bfloat16) as memory:
        connector.from_gpu(memory, 0, TOKENS, kvcaches=source)
        connector.to_gpu(memory, 0, TOKENS, kvcaches=target)
    assert same([t.contiguous().view(torch.uint8) for layer in target for t in layer], snapshot(source))
    assert not any(t[..., HEAD_SIZE:].any() for t in wide)
