"""What the connector for nested tuples has beyond its contract
(`tests/contract/test_gpu_connectors.py`).
"""

from __future__ import annotations

import pytest
import torch
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector, nested_tuple
from lmcache_core.memory import HostMemoryAllocator

from tests.fixtures import cuda_streams

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
    return tuple(
        tuple(
            torch.randint(0, 256, size, dtype=torch.uint8, generator=random).view(dtype)
            for _ in "KV"
        )
        for _ in range(LAYERS)
    )


def snapshot(layers):
    return [side.contiguous().view(torch.uint8).clone() for layer in layers for side in layer]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def strided(layers):
    """The same values, each head in memory of twice its size."""
    wide = [[torch.cat([side, side], dim=-1) for side in layer] for layer in layers]
    return [tuple(side[..., :HEAD_SIZE] for side in layer) for layer in wide]


def test_copies_on_a_device_without_streams_have_ended_when_they_return(
    connector, allocator, monkeypatch
):
    cuda_streams.install(monkeypatch)
    source, target = strided(caches(seed=1)), strided(caches(seed=2))
    memory = allocator.allocate(connector.get_shape(TOKENS), torch.bfloat16)
    connector.from_gpu(memory, 0, TOKENS, kvcaches=source)
    connector.to_gpu(memory, 0, TOKENS, kvcaches=target)
    assert same(snapshot(source), snapshot(target))
    memory.ref_count_down()


@pytest.mark.parametrize("way", ["bytes", "large bytes", "tensors"])
def test_progress_and_bytes_do_not_depend_on_the_way_of_copying(
    connector, allocator, monkeypatch, way
):
    if way == "large bytes":
        monkeypatch.setattr(nested_tuple, "MAX_WITH_GIL", 0)
    engine, target, seen = caches(), caches(seed=1), []
    if way == "tensors":
        engine, target = strided(engine), strided(target)
    with allocator.allocate(connector.get_shape(4), torch.bfloat16) as memory:
        connector.from_gpu(
            memory, 3, 7, **connector.checked({"kvcaches": engine, "progress": seen.append})
        )
        connector.to_gpu(
            memory, 3, 7, **connector.checked({"kvcaches": target, "progress": seen.append})
        )
    assert seen == 2 * [4 * HIDDEN * 2 * side for side in range(1, 2 * LAYERS + 1)]
    assert same([t[3:7] for t in snapshot(target)], [t[3:7] for t in snapshot(engine)])
    untouched = snapshot(caches(seed=1))
    for part in (slice(3), slice(7, None)):
        assert same([t[part] for t in snapshot(target)], [t[part] for t in untouched])


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(lambda k, v: (k, k), id="K is V"),
        pytest.param(lambda k, v: (k, v[:, :1].expand_as(v)), id="all heads are one"),
        pytest.param(
            lambda k, v: (k, v.view(-1).as_strided(v.shape, (HIDDEN - 1, HEAD_SIZE, 1))),
            id="tokens overlap",
        ),
        pytest.param(lambda k, v: (k, v.view(torch.int16).numpy()), id="not a tensor"),
    ],
)
def test_overlapping_memory_is_refused_and_untouched(connector, allocator, last):
    layers = caches()
    before = snapshot(layers)
    with (
        allocator.allocate(connector.get_shape(TOKENS), torch.bfloat16) as memory,
        pytest.raises(ValueError, match="kvcaches"),
    ):
        connector.to_gpu(memory, 0, TOKENS, kvcaches=[*layers[:-1], last(*layers[-1])])
    assert same(snapshot(layers), before)


@pytest.mark.parametrize(
    ("mode", "is_trained"), [(torch.inference_mode, False), (torch.enable_grad, True)]
)
def test_tensors_of_any_mode_are_read_and_written(connector, allocator, mode, is_trained):
    with mode():
        engine, target = (
            tuple(
                tuple(side.clone().requires_grad_(is_trained) for side in layer)
                for layer in caches(torch.float32, seed)
            )
            for seed in (0, 1)
        )
    wanted = [side.detach().clone() for layer in engine for side in layer]
    with allocator.allocate(connector.get_shape(TOKENS), torch.float32) as memory:
        connector.from_gpu(memory, 0, TOKENS, kvcaches=engine)
        connector.to_gpu(memory, 0, TOKENS, kvcaches=target)
    for side, then in zip((side for layer in target for side in layer), wanted, strict=True):
        assert torch.equal(side.detach().view(torch.uint8), then.view(torch.uint8))
