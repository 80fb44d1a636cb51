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
def test_a_missing_argument_is_named(connector, missing):
    kwargs = {"kvcaches": make_kv_caches(LAYOUT, 1), "slot_mapping": torch.tensor(SLOTS)}
    del kwargs[missing]
    memory = make_memory(connector.get_shape(1), "bfloat16")
    for copy in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(ValueError, match=missing):
            copy(memory, 4, 5, **kwargs)


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
def test_groups_in_the_same_memory_share_no_block(method):
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


CHECKED = torch.tensor([-1, -1, 9, 3, 4, 5, 14, 0])
"""Slots of which those of tokens [2, 8) are checked once for all chunks of a transfer."""


@pytest.fixture
def declared():
    return PagedGPUConnector(LAYOUT)


def fill(declared, engine, start, end, **kwargs):
    memory = make_memory(declared.get_shape(end - start), LAYOUT.kv_dtype)
    declared.from_gpu(memory, start, end, **kwargs)
    return bytes(memory.byte_array)


@pytest.mark.parametrize(("start", "end"), [(2, 8), (4, 7), (5, 5)])
def test_a_chunk_is_copied_as_with_slots_of_its_own(declared, start, end):
    engine = make_kv_caches(LAYOUT, 1)
    addresses = declared.addresses_of(engine, CHECKED, 2, 8)
    alone = fill(declared, engine, start, end, kvcaches=engine, slot_mapping=CHECKED)
    assert fill(declared, engine, start, end, addresses=addresses) == alone
    others = [make_kv_caches(LAYOUT, 2), make_kv_caches(LAYOUT, 2)]
    memory = make_memory(declared.get_shape(end - start), LAYOUT.kv_dtype)
    memory.byte_array[:] = alone
    declared.to_gpu(memory, start, end, kvcaches=others[0], slot_mapping=CHECKED)
    declared.to_gpu(memory, start, end, addresses=declared.addresses_of(others[1], CHECKED, 2, 8))
    assert same(*map(snapshot, others))


@pytest.mark.parametrize(("start", "end"), [(1, 4), (6, 9)])
def test_unchecked_tokens_are_refused(declared, start, end):
    engine = make_kv_caches(LAYOUT, 1)
    before = snapshot(engine)
    addresses = declared.addresses_of(engine, CHECKED, 2, 8)
    memory = make_memory(declared.get_shape(end - start), LAYOUT.kv_dtype)
    for copy in (declared.from_gpu, declared.to_gpu):
        with pytest.raises(
            LayoutError, match=rf"tokens \[{start}, {end}\) are not among those .* \[2, 8\)"
        ):
            copy(memory, start, end, addresses=addresses)
    assert same(snapshot(engine), before)
