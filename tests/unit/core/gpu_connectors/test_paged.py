from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import GPUConnectorInterface, VLLMPagedMemGPUConnector
from lmcache_core.memory import BytesBufferMemoryObj, HostMemoryAllocator, MemoryFormat, MemoryObjMetadata

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 3, 6, 4, 2, 5
HIDDEN = HEADS * HEAD_SIZE
SHAPE = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
SEQUENCE = torch.tensor([-1, -1, -1, -1, 17, 3, 9, 23, 0, 11])


@pytest.fixture
def connector():
    return VLLMPagedMemGPUConnector(HIDDEN, LAYERS)


@pytest.fixture
def allocator():
    allocator = HostMemoryAllocator(1 << 16)
    yield allocator
    allocator.check_integrity()
    assert allocator.used_bytes == 0


def random_bytes(shape, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=random).view(dtype)


def stacked(dtype=torch.bfloat16, seed=0):
    return [random_bytes((2, *SHAPE), dtype, seed + i) for i in range(LAYERS)]


def pairs(dtype=torch.bfloat16, seed=0):
    return [(random_bytes(SHAPE, dtype, seed + i), random_bytes(SHAPE, dtype, seed + i + 100)) for i in range(LAYERS)]


def interleaved(dtype=torch.bfloat16, seed=0):
    """Pages as some engines hold them: `[num_blocks, 2, …]`, K and V of a block side by side."""
    return [tuple(random_bytes((BLOCKS, 2, *SHAPE[1:]), dtype, seed + i).unbind(1)) for i in range(LAYERS)]


def snapshot(caches):
    return [side.contiguous().view(torch.uint8).clone() for layer in caches for side in layer if isinstance(side, torch.Tensor)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def row(caches, side, layer, slot):
    return caches[layer][side][slot // BLOCK_SIZE, slot % BLOCK_SIZE].reshape(HIDDEN).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [stacked, pairs, interleaved])
def test_what_leaves_the_pages_comes_back_into_others(connector, allocator, make, dtype):
    source, target = make(dtype), make(dtype, seed=50)
    with allocator.allocate(connector.get_shape(5), dtype, MemoryFormat.KV_BLOB) as memory:
        connector.from_gpu(memory, 4, 9, kvcaches=source, slot_mapping=SEQUENCE)
        for side in range(2):
            for layer in range(LAYERS):
                for token in range(5):
                    wanted = row(source, side, layer, int(SEQUENCE[4 + token]))
                    assert torch.equal(memory.tensor[side, layer, token].view(torch.uint8), wanted)
        other = SEQUENCE.flip(0)
        connector.to_gpu(memory, 0, 5, kvcaches=target, slot_mapping=other)
    untouched = snapshot(make(dtype, seed=50))
    for side in range(2):
        for layer in range(LAYERS):
            taken = {int(other[t]): int(SEQUENCE[4 + t]) for t in range(5)}
            for slot in range(BLOCKS * BLOCK_SIZE):
                before = untouched[layer * 2 + side][slot // BLOCK_SIZE, slot % BLOCK_SIZE].flatten()
                wanted = row(source, side, layer, taken[slot]) if slot in taken else before
                assert torch.equal(row(target, side, layer, slot), wanted)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_part_of_a_sequence_goes_round(data):
    slots = data.draw(st.lists(st.integers(0, BLOCKS * BLOCK_SIZE - 1), unique=True))
    start = data.draw(st.integers(0, len(slots)))
    end = data.draw(st.integers(start, len(slots)))
    mapping = torch.tensor([-1] * start + slots[start:], dtype=torch.int64)
    connector, allocator = VLLMPagedMemGPUConnector(HIDDEN, LAYERS), HostMemoryAllocator(1 << 16)
    source, target = stacked(), stacked(seed=7)
    with allocator.allocate(connector.get_shape(end - start), torch.bfloat16) as memory:
        connector.from_gpu(memory, start, end, kvcaches=source, slot_mapping=mapping)
        connector.to_gpu(memory, start, end, kvcaches=target, slot_mapping=mapping)
    for slot in range(BLOCKS * BLOCK_SIZE):
        wanted = source if slot in slots[start:end] else stacked(seed=7)
        assert torch.equal(row(target, 1, 2, slot), row(wanted, 1, 2, slot))


def test_the_shape_is_that_of_a_kv_blob(connector):
    assert isinstance(connector, GPUConnectorInterface)
    assert connector.get_shape(256) == torch.Size((2, LAYERS, 256, HIDDEN))


@pytest.mark.parametrize("missing", ["kvcaches", "slot_mapping"])
@pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
def test_a_missing_argument_is_named(connector, allocator, method, missing):
    kwargs = {"kvcaches": stacked(), "slot_mapping": SEQUENCE}
    with allocator.allocate(connector.get_shape(1), torch.bfloat16) as memory:
        for absent in ({k: v for k, v in kwargs.items() if k != missing}, {**kwargs, missing: None}):
            with pytest.raises(ValueError, match=missing):
                getattr(connector, method)(memory, 4, 5, **absent)


REFUSED = {
    "overlap with the prefix": {"start": 3},
    "only the prefix": {"start": 0, "end": 4},
    "beyond the sequence": {"start": 6, "end": 11},
    "negative start": {"start": -3, "end": 2},
    "backwards": {"start": 6, "end": 5, "num_tokens": 0},
    "too few layers": {"kvcaches": stacked()[:2]},
    "three sides": {"kvcaches": [torch.zeros(3, *SHAPE, dtype=torch.bfloat16) for _ in range(LAYERS)]},
    "hidden size of another model": {"kvcaches": [torch.zeros(2, *SHAPE[:3], 6, dtype=torch.bfloat16) for _ in range(LAYERS)]},
    "pages without heads": {"kvcaches": [t.flatten(3) for t in stacked()]},
    "pages of another dtype": {"kvcaches": stacked(torch.float16)},
    "elements of a head apart": {"kvcaches": [t.repeat_interleave(2, -1)[..., ::2] for t in stacked()]},
    "tokens that overlap": {"kvcaches": [t[:, :, :1].expand(-1, -1, BLOCK_SIZE, -1, -1) for t in stacked()]},
    "a layer that is no tensor": {"kvcaches": [*stacked()[:2], ("K", "V")]},
    "int32 slots": {"slot_mapping": SEQUENCE.int()},
    "slots as a list": {"slot_mapping": SEQUENCE.tolist()},
    "slots of two dimensions": {"slot_mapping": SEQUENCE[:, None]},
    "slot behind the last": {"slot_mapping": torch.where(SEQUENCE == 3, BLOCKS * BLOCK_SIZE, SEQUENCE)},
    "memory of another size": {"num_tokens": 4},
    "memory in another format": {"fmt": MemoryFormat.BINARY},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
def test_what_does_not_fit_is_refused_before_anything_is_written(connector, allocator, method, change):
    case = {"start": 4, "end": 9, "kvcaches": stacked(), "slot_mapping": SEQUENCE, "fmt": MemoryFormat.KV_BLOB} | change
    num_tokens = case.get("num_tokens", case["end"] - case["start"])
    with allocator.allocate(connector.get_shape(num_tokens), torch.bfloat16, case["fmt"]) as memory:
        memory.byte_array[:] = b"\xa5" * memory.get_size()
        before = snapshot(case["kvcaches"])
        with pytest.raises(ValueError):
            getattr(connector, method)(memory, case["start"], case["end"], kvcaches=case["kvcaches"], slot_mapping=case["slot_mapping"])
        assert bytes(memory.byte_array) == b"\xa5" * memory.get_size()
    assert same(snapshot(case["kvcaches"]), before)


def test_the_overlap_with_the_engines_prefix_is_explained(connector, allocator):
    with allocator.allocate(connector.get_shape(2), torch.bfloat16) as memory, pytest.raises(LayoutError, match="prefix"):
        connector.from_gpu(memory, 3, 5, kvcaches=stacked(), slot_mapping=SEQUENCE)


def test_a_slot_named_twice_is_read_but_not_written(connector, allocator):
    caches, twice = stacked(), torch.tensor([5, 5])
    before = snapshot(caches)
    with allocator.allocate(connector.get_shape(2), torch.bfloat16) as memory:
        connector.from_gpu(memory, 0, 2, kvcaches=caches, slot_mapping=twice)
        assert torch.equal(memory.tensor[0, 0, 0].view(torch.uint8), memory.tensor[0, 0, 1].view(torch.uint8))
        memory.byte_array[:] = bytes(memory.get_size())
        with pytest.raises(LayoutError, match="more than once"):
            connector.to_gpu(memory, 0, 2, kvcaches=caches, slot_mapping=twice)
    assert same(snapshot(caches), before)


def test_read_only_memory_is_read_but_not_written(connector):
    shape = tuple(connector.get_shape(2))
    content = random_bytes(shape, torch.bfloat16, 3)
    raw = bytes(content.view(torch.uint8).numpy().data)
    memory = BytesBufferMemoryObj(raw, MemoryObjMetadata(shape, torch.bfloat16, 0, 0, 1, MemoryFormat.KV_BLOB))
    caches = stacked()
    with pytest.raises(LayoutError, match="read-only"):
        connector.from_gpu(memory, 4, 6, kvcaches=caches, slot_mapping=SEQUENCE)
    connector.to_gpu(memory, 4, 6, kvcaches=caches, slot_mapping=SEQUENCE)
    assert torch.equal(row(caches, 1, 2, 17), content[1, 2, 0].view(torch.uint8))


def test_the_package_imports_no_kernels_until_they_are_needed():
    program = """
import sys
import lmcache_core.gpu_connectors as gpu_connectors
assert "lmcache_kernels" not in sys.modules
gpu_connectors.VLLMPagedMemGPUConnector
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    import lmcache_core.gpu_connectors as gpu_connectors

    with pytest.raises(AttributeError, match="NoSuchConnector"):
        _ = gpu_connectors.NoSuchConnector


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pages_on_a_gpu_go_through_host_memory(connector, allocator):
    source, target = ([t.cuda() for t in stacked(seed=s)] for s in (0, 50))
    for mapping in (SEQUENCE, SEQUENCE.cuda()):
        with allocator.allocate(connector.get_shape(6), torch.bfloat16) as memory:
            connector.from_gpu(memory, 4, 10, kvcaches=source, slot_mapping=mapping)
            connector.to_gpu(memory, 4, 10, kvcaches=target, slot_mapping=mapping)
        for slot in SEQUENCE[4:].tolist():
            assert torch.equal(row(target, 0, 1, slot), row(source, 0, 1, slot))
