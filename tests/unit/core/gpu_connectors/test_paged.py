"""What the connectors for paged memory have beyond their contract
(`tests/contract/test_gpu_connectors.py`).
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import (
    KVLayout,
    LayerGroup,
    LogicalMemory,
    Packing,
    PagedGPUConnector,
    VLLMPagedMemGPUConnector,
    VLLMPagedMemGPUConnectorV2,
)

from tests.suites.connector_suite import SLOTS, make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

HIDDEN, NUM_LAYERS = 15, 2
LAYOUT = one_group(packing=Packing.KV_FIRST)


@pytest.fixture
def connector():
    return VLLMPagedMemGPUConnector(HIDDEN, NUM_LAYERS)


@pytest.mark.parametrize("missing", ["kvcaches", "slot_mapping"])
@pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
def test_a_missing_argument_is_named(connector, method, missing):
    kwargs = {"kvcaches": make_kv_caches(LAYOUT, 1), "slot_mapping": torch.tensor(SLOTS)}
    memory = make_memory(connector.get_shape(1), "bfloat16")
    for absent in ({k: v for k, v in kwargs.items() if k != missing}, {**kwargs, missing: None}):
        with pytest.raises(ValueError, match=missing):
            getattr(connector, method)(memory, 4, 5, **absent)


def test_the_overlap_with_the_engines_prefix_is_explained(connector):
    with pytest.raises(LayoutError, match="prefix"):
        connector.from_gpu(
            make_memory(connector.get_shape(2), "bfloat16"),
            3,
            5,
            kvcaches=make_kv_caches(LAYOUT, 1),
            slot_mapping=torch.tensor(SLOTS),
        )


def test_pages_interleaved_by_block_come_as_pairs_of_views(connector):
    """As some engines hold them: `[num_blocks, 2, …]`, K and V of a block side by side."""
    layout = one_group(packing=Packing.BLOCK_FIRST)
    engine = make_kv_caches(layout, 1)
    memory = make_memory(connector.get_shape(11), "bfloat16")
    connector.from_gpu(
        memory,
        4,
        15,
        kvcaches=[tensor.unbind(1) for tensor in engine],
        slot_mapping=torch.tensor(SLOTS),
    )
    for token in range(11):
        wanted = LogicalMemory(layout, engine).read(0, 1, SLOTS[4 + token])
        assert torch.equal(
            memory.tensor[:, 1, token].view(torch.uint8), wanted.flatten(1).view(torch.uint8)
        )


def test_k_and_v_that_are_the_same_memory_are_read_but_not_written(connector):
    engine = [(k, k) for k, _ in make_kv_caches(one_group(), 1)]
    memory = make_memory(connector.get_shape(2), "bfloat16")
    connector.from_gpu(memory, 5, 7, kvcaches=engine, slot_mapping=torch.tensor(SLOTS))
    with pytest.raises(LayoutError, match="share memory"):
        connector.to_gpu(memory, 5, 7, kvcaches=engine, slot_mapping=torch.tensor(SLOTS))


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
@pytest.mark.parametrize("options", [{}, {"use_gpu": True, "chunk_size": 16, "device": "cuda"}])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_pages_on_a_gpu_go_through_host_memory(options, is_on_device):
    source, target = ([t.cuda() for t in make_kv_caches(LAYOUT, seed)] for seed in (1, 50))
    slots = torch.tensor(SLOTS, device="cuda" if is_on_device else "cpu")
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS, **options)
    memory = make_memory(connector.get_shape(11), "bfloat16")
    connector.from_gpu(memory, 4, 15, kvcaches=source, slot_mapping=slots)
    connector.to_gpu(memory, 4, 15, kvcaches=target, slot_mapping=slots)
    for slot in SLOTS[4:]:
        got, wanted = (
            LogicalMemory(LAYOUT, engine).read(0, 1, slot).view(torch.uint8)
            for engine in (target, source)
        )
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
def test_a_block_is_not_of_two_groups_that_lie_in_the_same_memory(method):
    connector = PagedGPUConnector(
        KVLayout(
            tuple(
                LayerGroup(name, 1, 3, 5, "bfloat16", packing="kv_first")
                for name in ("full", "window")
            )
        )
    )
    page = make_kv_caches(LAYOUT, 1)[0]
    memory = make_memory(connector.get_shape(4), "bfloat16")
    before, content = snapshot([page]), bytes(memory.byte_array)
    for slots in ([0, 1, 2, 3], [12, 13, 14, 3]):
        mappings = [torch.tensor([0, 1, 2, 4]), torch.tensor(slots)]
        with pytest.raises(
            LayoutError, match="'full' and 'window' are the same memory and both have block 0"
        ):
            getattr(connector, method)(memory, 0, 4, kvcaches=[page, page], slot_mapping=mappings)
    assert same(snapshot([page]), before)
    assert bytes(memory.byte_array) == content
    apart = [torch.tensor([0, 1, 2, 4]), torch.tensor([12, 13, 8, 15])]
    getattr(connector, method)(memory, 0, 4, kvcaches=[page, page], slot_mapping=apart)
    getattr(connector, method)(memory, 0, 4, kvcaches=[page, page.clone()], slot_mapping=apart[0])
