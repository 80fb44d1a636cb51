from __future__ import annotations

import pytest
import torch
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator, MemoryFormat

LAYERS, TOKENS, HEADS, HEAD_SIZE = 3, 11, 2, 5
HIDDEN = HEADS * HEAD_SIZE
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("start", "end"), [(0, TOKENS), (3, 7), (10, 11), (5, 5)])
def test_a_part_of_the_sequence_goes_round_and_the_rest_stays(connector, allocator, dtype, start, end):
    source, target = caches(dtype), caches(dtype, seed=1)
    with allocator.allocate(connector.get_shape(end - start), dtype) as memory:
        connector.from_gpu(memory, start, end, kvcaches=source)
        for layer in range(LAYERS):
            for side in range(2):
                wanted = source[layer][side][start:end].reshape(end - start, HIDDEN)
                assert torch.equal(memory.tensor[side, layer].view(torch.uint8), wanted.view(torch.uint8))
        connector.to_gpu(memory, start, end, kvcaches=target)
    untouched = snapshot(caches(dtype, seed=1))
    for got, taken, before in zip(snapshot(target), snapshot(source), untouched, strict=True):
        assert torch.equal(got[start:end], taken[start:end])
        assert torch.equal(got[:start], before[:start])
        assert torch.equal(got[end:], before[end:])


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


REFUSED = {
    "no kvcaches": {"kvcaches": None},
    "too few layers": {"kvcaches": caches()[:2]},
    "a last layer of three": {"kvcaches": [*caches()[:2], (*caches()[2], caches()[2][0])]},
    "a last layer of one": {"kvcaches": [*caches()[:2], caches()[2][:1]]},
    "too few tokens": {"kvcaches": caches(shape=(8, HEADS, HEAD_SIZE))},
    "no tokens": {"kvcaches": caches(shape=(0, HEADS, HEAD_SIZE))},
    "another hidden size": {"kvcaches": caches(shape=(TOKENS, HEADS, 6))},
    "another dtype": {"kvcaches": caches(torch.float16)},
    "negative start": {"start": -2, "end": 3},
    "backwards": {"start": 5, "end": 4, "num_tokens": 0},
    "beyond the sequence": {"start": 8, "end": 12},
    "memory of another size": {"num_tokens": 3},
    "memory in another format": {"fmt": MemoryFormat.BINARY},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
def test_what_does_not_fit_is_refused_before_anything_is_written(connector, allocator, method, change):
    case = {"start": 4, "end": 9, "kvcaches": caches(), "fmt": MemoryFormat.KV_BLOB} | change
    num_tokens = case.get("num_tokens", case["end"] - case["start"])
    with allocator.allocate(connector.get_shape(num_tokens), torch.bfloat16, case["fmt"]) as memory:
        memory.byte_array[:] = b"\xa5" * memory.get_size()
        before = snapshot(case["kvcaches"] or ())
        with pytest.raises(ValueError):
            getattr(connector, method)(memory, case["start"], case["end"], kvcaches=case["kvcaches"])
        assert bytes(memory.byte_array) == b"\xa5" * memory.get_size()
    assert same(snapshot(case["kvcaches"] or ()), before)
